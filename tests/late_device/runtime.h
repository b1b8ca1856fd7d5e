// The streams and the memory of the test device "late", see late_device.cpp.

#pragma once

#include <Python.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace {

constexpr auto LATE = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(LATE, 0);

// ── streams ─────────────────────────────────────────────────────────────────────────────────────────────

struct Event {
  int64_t stream;
  size_t position;  // number of items that precede it
};

struct Item {
  std::function<void()> kernel;  // empty: wait for the event
  Event event;
};

struct Queue {
  std::deque<Item> items;
  size_t queued = 0, done = 0;
};

std::recursive_mutex mutex;
std::map<int64_t, Queue> queues;
int64_t streams = 1;  // 0 is the default stream
int64_t host_waits = 0;
bool others_first = false;
thread_local int64_t current = 0;

// Whoever holds the mutex may need the GIL, to run a kernel written in Python or to free what Python holds.
struct Lock {
  Lock() {
    if (mutex.try_lock()) return;
    PyThreadState* python = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    mutex.lock();
    if (python != nullptr) PyEval_RestoreThread(python);
  }
  ~Lock() { mutex.unlock(); }
  Lock(const Lock&) = delete;
};

void push(int64_t stream, Item item) {
  Queue& queue = queues[stream];
  queue.items.push_back(std::move(item));
  queue.queued++;
}

void run_until(Event event) {
  Queue& queue = queues[event.stream];
  while (queue.done < event.position) {
    Item item = std::move(queue.items.front());
    queue.items.pop_front();
    queue.done++;
    if (item.kernel) {
      item.kernel();
    } else {
      run_until(item.event);
    }
  }
}

Event now_on(int64_t stream) {
  return {stream, queues[stream].queued};
}

void host_waits_for(Event event) {
  Lock lock;
  host_waits++;
  if (others_first) {
    for (int64_t stream = streams - 1; stream >= 0; stream--) {
      if (stream != event.stream) run_until(now_on(stream));
    }
  }
  run_until(event);
}

void host_waits_for_stream(int64_t stream) {
  Lock lock;
  host_waits_for(now_on(stream));
}

// ── memory ──────────────────────────────────────────────────────────────────────────────────────────────

constexpr size_t SPACE = size_t(1) << 30, UNIT = 512;

struct Block {
  size_t size;
  int64_t stream;
  std::set<int64_t> recorded;
  std::vector<Event> busy;
};

std::map<char*, Block> blocks;
std::map<std::pair<int64_t, size_t>, std::vector<char*>> free_blocks;
char *device_space = nullptr, *kernel_space = nullptr;
size_t used = 0;

void make_space() {
  int file = memfd_create("late", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, SPACE) == 0, "late: no memory");
  device_space = static_cast<char*>(mmap(nullptr, SPACE, PROT_NONE, MAP_SHARED, file, 0));
  kernel_space = static_cast<char*>(mmap(nullptr, SPACE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  TORCH_CHECK(device_space != MAP_FAILED && kernel_space != MAP_FAILED, "late: no memory");
  close(file);
}

// Where kernels find what the device has at this address.
char* at_kernel(const void* memory) {
  char* address = static_cast<char*>(const_cast<void*>(memory));
  return address == nullptr ? nullptr : kernel_space + (address - device_space);
}

bool is_done(const Event& event) {
  return queues[event.stream].done >= event.position;
}

void release(void* memory) {
  Lock lock;
  Block& block = blocks[static_cast<char*>(memory)];
  for (int64_t stream : block.recorded) block.busy.push_back(now_on(stream));
  block.recorded.clear();
  free_blocks[{block.stream, block.size}].push_back(static_cast<char*>(memory));
}

struct LateAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &release, DEVICE};
    Lock lock;
    size_t size = (n + UNIT - 1) / UNIT * UNIT;
    auto& list = free_blocks[{current, size}];
    for (size_t i = list.size(); i-- > 0;) {  // the one freed last first
      char* memory = list[i];
      auto& busy = blocks[memory].busy;
      if (!std::all_of(busy.begin(), busy.end(), is_done)) continue;
      busy.clear();
      list.erase(list.begin() + i);
      return {memory, memory, &release, DEVICE};
    }
    if (device_space == nullptr) make_space();
    TORCH_CHECK(used + size <= SPACE, "late: out of memory");
    char* memory = device_space + used;
    memset(kernel_space + used, 0xff, size);  // NaN
    used += size;
    blocks[memory] = {size, current, {}, {}};
    return {memory, memory, &release, DEVICE};
  }
  void copy_data(void*, const void*, std::size_t) const override { TORCH_CHECK(false, "late: copy_data"); }
};

void record(const c10::DataPtr& memory, c10::Stream stream) {
  Lock lock;
  auto found = blocks.find(static_cast<char*>(memory.get_context()));
  if (found != blocks.end() && found->second.stream != stream.id()) found->second.recorded.insert(stream.id());
}

// Pinned memory is never freed: the kernels that read it hold no reference.
std::map<const char*, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    Lock lock;
    char* memory = static_cast<char*>(aligned_alloc(64, (n / 64 + 1) * 64));
    pinned[memory] = n;
    return {memory, memory, [](void*) {}, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
};

LateAllocator allocator;
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  Lock lock;
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  auto [start, size] = *std::prev(after);
  return static_cast<const char*>(data) < start + std::max<size_t>(size, 1);
}

}  // namespace
