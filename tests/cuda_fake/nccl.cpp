// What stands for libnccl.so.2 where processes find each other, and none of them comes to a call between GPUs: a world is made
// at once, and nothing is sent in it.
#include <cstdlib>
#include <cstring>

#define API extern "C" __attribute__((visibility("default"))) int
enum { DONE = 0, INVALID_USAGE = 5 };

API ncclGetVersion(int* version) { return *version = 22703, DONE; }
API ncclGetUniqueId(void* id) { return std::memset(id, 7, 128), DONE; }
struct Id { char bytes[128]; };
API ncclCommInitRank(void** comm, int, Id, int) { return *comm = std::malloc(1), DONE; }
API ncclCommSplit(void*, int color, int, void** comm, void*) { return *comm = color < 0 ? nullptr : std::malloc(1), DONE; }
API ncclCommAbort(void* comm) { return std::free(comm), DONE; }
API ncclCommDestroy(void* comm) { return std::free(comm), DONE; }
API ncclCommGetAsyncError(void*, int* state) { return *state = DONE, DONE; }
API ncclGroupStart() { return DONE; }
API ncclGroupEnd() { return DONE; }
#define NOT_HERE(name) API name() { return INVALID_USAGE; }
NOT_HERE(ncclSend) NOT_HERE(ncclRecv) NOT_HERE(ncclAllGather) NOT_HERE(ncclAllReduce) NOT_HERE(ncclReduceScatter)
#define TEXT(name) extern "C" __attribute__((visibility("default"))) const char* name() { return "nothing goes between GPUs here"; }
TEXT(ncclGetLastError) TEXT(ncclGetErrorString)
