// libforebay_ucx_first.so: loaded before UCX itself.
//
// When UCX is loaded it writes jumps into libc's mmap and munmap, to learn when memory that it has
// registered is given back. Ours is not, and in a training process other threads are running that
// code meanwhile. Only its lowest library, which does nothing by itself, can be told in time.
#include <ucm/api/ucm.h>

extern "C" __attribute__((visibility("default"))) void ForebayUcxFirst() {
  ucm_global_config_t memory = ucm_global_opts;
  memory.enable_events = 0;
  memory.mmap_hook_mode = UCM_MMAP_HOOK_NONE;
  ucm_set_global_opts(&memory);
}
