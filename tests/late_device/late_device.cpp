// A PrivateUse1 device for tests, "late", on which missing synchronization is a wrong number.
//
// Memory: host code that reads it ends with SIGSEGV. Kernels read it through a second mapping.
// Streams: queues. Nothing runs until the host waits; then runs what its wait requires, and nothing else, in the order
// "late"; in the order "early" all other streams run first. So a schedule that a missing wait allows is a schedule that
// happens, without threads or clocks.
// Allocator: as CUDA's caching allocator. Memory that is freed is reused at once on the stream that it was allocated on,
// except while streams named by record_stream have not done what they had to do when it was freed.
// Kernels: every operator, on the CPU; outputs have the shapes that the operator has on the meta device.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "runtime.h"

namespace {

// ── what PyTorch asks of a device ───────────────────────────────────────────────────────────────────────

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  c10::DeviceType type() const override { return LATE; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  static c10::Stream of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }
  c10::Stream getStream(c10::Device) const noexcept override { return of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return of(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    Lock lock;
    return of(streams++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    auto before = current;
    current = stream.id();
    return of(before);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock;
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = now_on(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock;
    if (event != nullptr) push(stream.id(), {nullptr, *static_cast<Event*>(event)});
  }
  bool queryEvent(void* event) const override {
    Lock lock;
    return event == nullptr || is_done(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits_for_stream(stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    for (int64_t stream = 0; stream < streams; stream++) host_waits_for_stream(stream);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    ::record(memory, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ── kernels ─────────────────────────────────────────────────────────────────────────────────────────────

at::Tensor for_kernel(const at::Tensor& x) {
  return at::from_blob(at_kernel(x.const_data_ptr()), x.sizes(), x.strides(), x.options().device(c10::kCPU));
}

bool is_late(const at::Tensor& x) {
  return x.defined() && x.device().type() == LATE;
}

template <class F>
c10::IValue map_tensors(const c10::IValue& value, F f) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    std::vector<at::Tensor> all;
    for (const at::Tensor& x : value.toTensorVector()) all.push_back(f(x));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const std::optional<at::Tensor>& x : value.toOptionalTensorVector()) {
      all.push_back(x.has_value() && x->defined() ? std::optional<at::Tensor>(f(*x)) : x);
    }
    return all;
  }
  if (value.isDevice() && value.toDevice().type() == LATE) return c10::Device(c10::kCPU);
  return value;
}

using torch::jit::Stack;

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

at::Tensor new_late(const at::Tensor& like) {
  return at::detail::empty_strided_generic(
      like.sizes(), like.strides(), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.scalar_type());
}

// Kernels read and write the memory that a tensor had when they were queued: its size cannot change later.
const at::Tensor& resize_to(const at::Tensor& x, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  Lock lock;
  auto* storage = x.storage().unsafeGetStorageImpl();
  size_t before = storage->nbytes(), n = (x.storage_offset() + c10::multiply_integers(size)) * x.element_size();
  if (n > before) {
    auto old = storage->set_data_ptr(allocator.allocate(n));
    storage->set_nbytes(n);
    record(old, Guard::of(current));
    char *from = at_kernel(old.get()), *to = at_kernel(storage->mutable_data());
    if (before > 0) push(current, {[=]() { memcpy(to, from, before); }, {}});
  }
  x.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return x;
}

// Resize empty outputs as the operator does on the meta device.
void resize_outputs(const c10::OperatorHandle& op, const Stack& given, Stack on_meta) {
  const auto& arguments = op.schema().arguments();
  auto is_empty_output = [&](size_t i) {
    const auto* alias = arguments[i].alias_info();
    return alias != nullptr && alias->isWrite() && given[i].isTensor() && is_late(given[i].toTensor()) &&
        given[i].toTensor().numel() == 0;
  };
  bool any = false;
  for (size_t i = 0; i < given.size(); i++) any |= is_empty_output(i);
  if (!any) return;
  Stack inputs = on_meta;
  run_on_cpu(op, &on_meta);
  for (size_t i = 0; i < given.size(); i++) {
    if (is_empty_output(i)) resize_to(given[i].toTensor(), inputs[i].toTensor().sizes(), {});
  }
}

void enqueue(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  size_t n = schema.arguments().size();
  Stack given(stack->end() - n, stack->end()), on_meta, on_cpu;
  for (const auto& value : given) {
    on_meta.push_back(map_tensors(value, [](const at::Tensor& x) {
      if (!is_late(x)) return x;
      return at::empty_strided(x.sizes(), x.strides(), x.options().device(c10::kMeta));
    }));
  }
  resize_outputs(op, given, on_meta);
  for (const auto& value : given) {
    on_cpu.push_back(map_tensors(value, [](const at::Tensor& x) { return is_late(x) ? for_kernel(x) : x.clone(); }));
  }
  bool adds_outputs = !schema.returns().empty() && schema.returns()[0].alias_info() == nullptr;
  bool of_tensors = true;
  for (const auto& value : schema.returns()) of_tensors &= value.type()->isSubtypeOf(*c10::TensorType::get());
  std::vector<at::Tensor> outputs;
  if (of_tensors && adds_outputs) {
    try {
      run_on_cpu(op, &on_meta);
      for (const auto& value : on_meta) outputs.push_back(value.toTensor().defined() ? new_late(value.toTensor()) : at::Tensor());
    } catch (const std::exception&) {  // its outputs' shapes depend on values
      of_tensors = false;
    }
  }
  torch::jit::drop(*stack, n);
  if (!of_tensors) {  // the host waits
    Lock lock;
    host_waits_for_stream(current);
    run_on_cpu(op, &on_cpu);
    for (const auto& value : on_cpu) {
      stack->push_back(map_tensors(value, [](const at::Tensor& x) {
        at::Tensor y = new_late(x);
        for_kernel(y).copy_(x);
        return y;
      }));
    }
    return;
  }
  std::vector<at::Tensor> written;
  for (const auto& y : outputs) written.push_back(y.defined() ? for_kernel(y) : y);
  {
    Lock lock;
    push(current, {[op, on_cpu, written]() {
           auto arguments = on_cpu;
           run_on_cpu(op, &arguments);
           for (size_t i = 0; i < written.size(); i++) {
             if (written[i].defined()) written[i].copy_(arguments[i].toTensor());
           }
         }, {}});
  }
  if (adds_outputs) {
    for (auto& y : outputs) stack->push_back(y);
    return;
  }
  for (const auto& result : schema.returns()) {  // in place, or out=: returns the argument that it writes to
    for (size_t i = 0; i < n; i++) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias != nullptr && *alias == *result.alias_info()) stack->push_back(given[i]);
    }
  }
}

// ── what is not a kernel: allocation, views, copies, values for the host ────────────────────────────────

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>,
    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& x, const at::Tensor& y, bool non_blocking) {
  Lock lock;
  bool to_host = !is_late(y), waits = is_late(x) != is_late(y) && !non_blocking;
  at::Tensor source = is_late(x) ? for_kernel(x) : is_pinned(x.const_data_ptr()) ? x.detach() : x.clone();
  at::Tensor target = to_host ? y.detach() : for_kernel(y);
  if (x.is_conj() != source.is_conj()) source = source.conj();
  push(current, {[source, target]() {
         at::AutoDispatchBelowADInplaceOrView below;
         target.copy_(source);
       }, {}});
  if (waits) host_waits_for_stream(current);
  return y;
}

at::Scalar value_for_host(const at::Tensor& x) {
  host_waits_for_stream(current);
  return for_kernel(x).item();
}

void record_stream(at::Tensor& x, c10::Stream stream) {
  record(x.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("is_set_to", at::native::is_set_to);
  m.impl("resize_", resize_to);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", value_for_host);
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&enqueue>());
}

TORCH_LIBRARY(late, m) {
  m.def("others_first(bool value) -> ()", [](bool value) { others_first = value; });
  m.def("host_waits() -> int", []() { return host_waits; });
  m.def("for_kernels(int address) -> int", [](int64_t address) {  // the host's as they are
    auto* memory = reinterpret_cast<char*>(address);
    bool is_device = device_space <= memory && memory < device_space + SPACE;
    return is_device ? reinterpret_cast<int64_t>(at_kernel(memory)) : address;
  });
}

const int registered = [] {
  at::SetAllocator(LATE, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return 0;
}();

}  // namespace
