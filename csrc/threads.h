// The threads of the process's OpenMP runtime.
#pragma once
#include <stdint.h>

#include <string>

namespace axisnorm {

// The threads that the next large call may use; 1 without OpenMP and in a forked child.
int max_threads();
const char *openmp_source();  // where the OpenMP runtime was found
void set_torch_openmp(const char *path);  // the file of the runtime that torch brings, if not loaded

// For so many parts of work on so many elements.
int threads_for(int64_t parts, int64_t elements);

struct OpenMP {
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = nullptr;
  void (*barrier)() = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;
  int (*max_threads)() = nullptr;
  int (*in_parallel)() = nullptr;
  std::string source = "none";

  OpenMP();

 private:
  bool take(void *library, const char *name);  // all functions from one place, or none
};
OpenMP &openmp();

// body(part, parts), on this thread or on several.
template <class Body> void parallel(int threads, const Body &body) {
  if (threads < 2) return body(0, 1);
  openmp().parallel(
      [](void *p) {
        const OpenMP &o = openmp();
        (*static_cast<const Body *>(p))(o.thread_num(), o.num_threads());
      },
      const_cast<Body *>(&body), (unsigned)threads, 0);
}

}  // namespace axisnorm
