// SPDX-License-Identifier: Apache-2.0
//
// PyTorch's own threads. PyTorch computes on the threads of an OpenMP runtime, which keep their cores busy for some
// milliseconds after each operator while they wait for the next. Threads of ours beside them would share those cores.
// So in a process with PyTorch a call computes on PyTorch's threads, and torch.set_num_threads() holds for it.
#pragma once

namespace fovea::cpu {

// How many threads PyTorch would use for an operator that this thread called. 0: PyTorch is not in this process, or its
// threads cannot be called.
int pytorch_threads();

// Runs work(context, n) for n in [0, threads) on PyTorch's threads; n = 0 is the caller. Not every n need run. False:
// nothing was done, because PyTorch has not so many threads, or because this process was forked since this library was
// loaded: an OpenMP runtime does not survive that.
bool run_on_pytorch_threads(int threads, void (*work)(void* context, int thread), void* context);

}  // namespace fovea::cpu
