// A launch may begin before the one ahead of it on its stream has ended, where the host asks for
// that: `Launcher`, `early`. Older GPUs than 9.0 cannot, and there it does not ask.
#pragma once

// The next launch may begin once all blocks of this one are here or have ended.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// All that launches ahead of this one have written is there, and nobody reads what this one will
// write to. Before it a kernel may read what it was given before the launch ahead of it began.
__device__ __forceinline__ void await_launches_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
