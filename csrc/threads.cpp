// Finds OpenMP at run time.
//
// There must be one runtime in the process: two of them, each with threads that spin after a parallel
// region, slow each other down several hundredfold. torch brings its own libgomp.so.1, and whichever
// is loaded first serves both, because the loader identifies it by that name. So nothing is linked.
// Older wheels of torch give the file a name of their own: where torch is installed and not loaded yet,
// its file is taken, which the loader then knows by where it is.
#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>

#include <atomic>
#include <type_traits>

namespace axisnorm {
namespace {

std::string &torch_openmp() {
  static std::string path;
  return path;
}

std::atomic<bool> forked{false};  // this is a forked child in which libgomp's threads are missing
std::atomic<bool> threads_at_fork{false};

// Waking the threads costs as much as computing about this many elements.
constexpr int64_t SERIAL = 20000;

}  // namespace

OpenMP::OpenMP() {
  if (take(RTLD_DEFAULT, "already in the global scope")) return;
  if (take(dlopen("libgomp.so.1", RTLD_NOW | RTLD_NOLOAD), "already loaded libgomp.so.1")) return;
  const std::string &own = torch_openmp();
  if (!own.empty() && take(dlopen(own.c_str(), RTLD_NOW | RTLD_GLOBAL), "loaded torch's")) return;
  take(dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL), "loaded libgomp.so.1");
}

bool OpenMP::take(void *library, const char *name) {
  if (library != RTLD_DEFAULT && !library) return false;
  const auto find = [&](auto &function, const char *symbol) {
    typedef std::remove_reference_t<decltype(function)> Function;
    function = reinterpret_cast<Function>(dlsym(library, symbol));
    return function != nullptr;
  };
  if (find(parallel, "GOMP_parallel") && find(barrier, "GOMP_barrier") &&
      find(thread_num, "omp_get_thread_num") && find(num_threads, "omp_get_num_threads") &&
      find(max_threads, "omp_get_max_threads") && find(in_parallel, "omp_in_parallel")) {
    // libgomp hangs in a forked child that inherits a thread pool without its threads. Whoever made
    // the pool (torch, too), its threads exist at the time of the fork.
    pthread_atfork(
        [] {
          struct stat s;  // a folder with one subfolder has three links
          threads_at_fork = stat("/proc/self/task", &s) != 0 || s.st_nlink != 3;
        },
        nullptr, [] { if (threads_at_fork) forked = true; });
    Dl_info info;
    source = name;
    if (dladdr(reinterpret_cast<void *>(parallel), &info) && info.dli_fname)
      source += std::string(": ") + info.dli_fname;
    return true;
  }
  parallel = nullptr;
  return false;
}

OpenMP &openmp() {
  static OpenMP o;
  return o;
}

int threads_for(int64_t parts, int64_t elements) {
  if (elements < SERIAL || parts < 2) return 1;
  int64_t threads = max_threads();
  if (threads > parts) threads = parts;
  if (threads > elements / (SERIAL / 2)) threads = elements / (SERIAL / 2);
  return (int)threads;
}

int max_threads() {
  const OpenMP &o = openmp();
  if (!o.parallel || forked || o.in_parallel()) return 1;
  const int threads = o.max_threads();
  return threads < 1 ? 1 : threads;
}
const char *openmp_source() { return openmp().source.c_str(); }
void set_torch_openmp(const char *path) { torch_openmp() = path; }

}  // namespace axisnorm
