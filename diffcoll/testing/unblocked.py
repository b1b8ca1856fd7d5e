"""What the server that forks processes imports last: Ctrl-C no longer waits in it and in what it forks.

While the server imports PyTorch, Ctrl-C would print where it is. One that has come meanwhile is dropped here: it was
for the process that uses the server.
"""

import signal

handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
signal.signal(signal.SIGINT, handler)
