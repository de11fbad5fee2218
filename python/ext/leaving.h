// The end of the process while other threads are in their loops over loaders.
//
// Before Python 3.14 a daemon thread that asks for the GIL after the interpreter has begun to shut
// down is unwound, which ends the process where C++ is below it: ours, or that of PyTorch, which
// gives the GIL up while it frees a tensor. So the interpreter's atexit asks the threads to wait in
// next(), and gives them a moment to come there.
#pragma once

namespace forebay::python {

// This thread loops over a loader: it is waited for at exit.
void CountConsumer();

// Whether this thread has to wait for the end: give the GIL up for that.
bool EndAwaited();

}  // namespace forebay::python
