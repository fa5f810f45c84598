// Picks the instruction set, cuts the work into parts and runs them on threads.
#include "dispatch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <array>
#include <atomic>
#include <new>
#include <string>

extern "C" {
extern const Table table_v4_bf16, table_v4, table_v3, table_generic;
}

namespace axisnorm {
namespace {

// ---- instruction sets, best first

struct Isa {
  const Table *table;
  bool (*supported)();
};

const Isa isas[] = {
#ifdef HAVE_ISA_v4_bf16
    {&table_v4_bf16,
     [] { return __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512bf16"); }},
#endif
#ifdef HAVE_ISA_v4
    {&table_v4, [] { return __builtin_cpu_supports("x86-64-v4") != 0; }},
#endif
#ifdef HAVE_ISA_v3
    {&table_v3, [] { return __builtin_cpu_supports("x86-64-v3") != 0; }},
#endif
#ifdef HAVE_ISA_generic
    {&table_generic, [] { return true; }},
#endif
};
constexpr int ISAS = sizeof isas / sizeof *isas;

struct Selection {
  const char *names[ISAS + 1] = {};
  const Table *tables[ISAS] = {};
  std::atomic<const Table *> current;
  std::string error;

  Selection() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
#endif
    int count = 0;
    for (const Isa &isa : isas)
      if (isa.supported()) {
        tables[count] = isa.table;
        names[count++] = isa.table->name;
      }
    current = tables[0];
    const char *wanted = getenv("AXISNORM_ISA");
    if (wanted && *wanted && !set(wanted)) {
      error = std::string("AXISNORM_ISA=") + wanted + " is not supported here; supported:";
      for (int i = 0; i < count; i++) error += std::string(" ") + names[i];
    }
  }
  bool set(const char *name) {
    for (int i = 0; names[i]; i++)
      if (!strcmp(names[i], name)) {
        current = tables[i];
        return true;
      }
    return false;
  }
};

Selection &selection() {
  static Selection s;
  return s;
}

// Memory for one call: on the stack where it is little, since allocating it would take as long as a
// short row, else a block that the thread keeps: given back to the system and taken again, its pages
// would be faulted in by every call (250 us of a backward of 1024 x 768 that takes 280).
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : data_(bytes ? small_ : nullptr) {
    if (bytes <= (int64_t)sizeof small_) return;
    for (Block &block : kept()) {
      if (block.used || bytes > KEPT) continue;
      block.reserve(bytes);
      block.used = true;
      block_ = &block;
      data_ = block.data;
      return;
    }
    data_ = allocate(bytes);
  }
  ~Scratch() {
    if (block_) block_->used = false;
    else if (data_ != small_) free(data_);
  }
  Scratch(const Scratch &) = delete;
  void *data() { return data_; }

 private:
  static constexpr int64_t KEPT = 4 << 20;

  static void *allocate(int64_t bytes) {
    void *data;
    if (posix_memalign(&data, 64, (size_t)bytes)) throw std::bad_alloc();
    return data;
  }

  struct Block {
    void *data = nullptr;
    int64_t size = 0;
    bool used = false;
    void reserve(int64_t bytes) {
      if (bytes <= size) return;
      free(data);
      data = nullptr;
      size = 0;
      data = allocate(bytes);
      size = bytes;
    }
    ~Block() { free(data); }
  };
  static std::array<Block, 5> &kept() {  // as many as one call needs at once
    static thread_local std::array<Block, 5> blocks;
    return blocks;
  }

  alignas(64) unsigned char small_[12288];
  void *data_;
  Block *block_ = nullptr;
};

// ---- how a tensor goes through the caches

bool is_amd() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}
const bool amd = is_amd();

// From so many bytes on an output is written past the caches.
//
// Intel: three quarters of a last cache of 32 MB, in which x lies, too. That a larger one is shared with
// others shows: on a machine with 300 MB of it a third of the time is saved from 100 MB on, and nothing
// lost at 24 MB.
//
// AMD: eight cores share 32 MB, and a virtual machine has a share of that. Where x, the gradient and
// both outputs take 24 MB, a step of training takes a fifth to a third less, also if its outputs are read
// at once a tenth; at 20 MB lines take a tenth more, and lanes, which are read with more of a stride, a
// fifth less; at 12 MB all take more (Zen 4, two cores). A forward alone has two tensors, not four: of
// 10 MB it takes up to twice as long. Lines of memory that are not written as a whole are read before:
// of 14 times 14 floats it took twice as long.
std::atomic<int64_t> stream_limit{amd ? 6 << 20 : 24 << 20};

// How a tensor is written: so many elements without a gap; by lanes; in backward.
struct Written {
  int64_t run;
  bool lanes, backward;
};
bool streams(const Job &job, int64_t bytes, const Written &how) {
  const int64_t limit = stream_limit.load(std::memory_order_relaxed);
  if (!amd) return bytes >= limit;
  const int64_t caches = (max_threads() + 7) / 8;
  const bool trains = how.backward || (job.stats && !job.alone);
  const int64_t least = !trains ? 4 * limit : how.lanes ? limit * 3 / 4 : limit;
  return how.run * element_size(job.dtype) % 64 == 0 && bytes >= least * caches;
}

// ---- tensors that are read one row or group after another

// AMD's processors (measured: Zen 4) fetch what comes next by themselves, but not of two rows at once,
// and what they are told to fetch delays them: a LayerNorm of 12 MB takes two thirds of the time and its
// backward half of it. One of 3 MB would take an eighth more, and Intel's would lose as much at any size.
std::atomic<int64_t> single_limit{amd ? 6 << 20 : INT64_MAX};

// From so many bytes on the sums of the next rows are not taken while two are written: together they wait
// longer for memory (Zen 4: a layer_norm takes 12 cycles a vector, or 21).
constexpr int64_t overlap_limit = 6 << 20;

// How a tensor of so many elements goes through the caches.
void set_access(Job &job, int64_t elements, const Written &how, bool masked = false) {
  const int64_t bytes = elements * element_size(job.dtype);
  job.streamed = !masked && streams(job, bytes, how);
  job.singly = bytes >= single_limit.load(std::memory_order_relaxed);
  job.overlapped = job.y && !job.streamed && !job.singly && bytes < overlap_limit;
}

// ---- the chunks of backward

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Long enough that zeroing and merging the sums costs little beside the rows, short enough for many
// threads and for float sums: at most 256 rows, unless the sums would need more than 4 MB.
Chunks chunks_of(const Job &job, int64_t element) {
  Chunks c = {};
  c.pitch = ceil_div(job.n, 16) * 16;
  const int64_t enough_work = ceil_div(24000, job.n);
  int64_t rows = ceil_div(job.rows, 64);
  if (rows < enough_work) rows = enough_work;
  if (rows > 256) rows = 256;
  int64_t most = (4 << 20) / (2 * c.pitch * element);
  if (most < 8) most = 8;
  if (rows < ceil_div(job.rows, most)) rows = ceil_div(job.rows, most);
  c.rows = ceil_div(rows, 4) * 4;
  c.count = ceil_div(job.rows, c.rows);
  return c;
}

}  // namespace

void forward(const Job &given) {
  if (given.rows <= 0 || given.n <= 0) return;
  Job job = given;
  set_access(job, job.rows * job.n, {job.n, false, false});
  const Table &table = *selection().current.load(std::memory_order_relaxed);
  Scratch scratch(table.scratch(&job));
  Affine affine;
  table.prepare(&job, scratch.data(), &affine);
  parallel(threads_for(job.rows, job.rows * job.n), [&](int64_t part, int64_t parts) {
    table.forward(&job, &affine, job.rows * part / parts, job.rows * (part + 1) / parts);
  });
}

void backward(const Job &given) {
  if (given.n <= 0) return;
  Job job = given;
  set_access(job, job.rows * job.n, {job.n, false, true});
  const Table &table = *selection().current.load(std::memory_order_relaxed);
  const int64_t element = job.dtype == F64 ? 8 : 4;
  Scratch scratch(table.scratch(&job));
  Chunks chunks = chunks_of(job, element);
  const bool params = job.dweight || job.dbias;
  Scratch sums(params ? chunks.count * 2 * chunks.pitch * element : 0);
  chunks.sums = sums.data();
  Affine affine;
  table.prepare(&job, scratch.data(), &affine);
  parallel(threads_for(chunks.count, job.rows * job.n), [&](int64_t part, int64_t parts) {
    table.backward(&job, &affine, &chunks, chunks.count * part / parts,
                   chunks.count * (part + 1) / parts);
    if (!params) return;
    if (parts > 1) openmp().barrier();
    const int64_t tiles = ceil_div(job.n, 64);
    const int64_t end = tiles * (part + 1) / parts * 64;
    table.merge(&job, &chunks, tiles * part / parts * 64, end < job.n ? end : job.n);
  });
}

// ---- the nests

namespace {

alignas(64) const float float_one[16] = {1};
alignas(64) const double double_one[8] = {1};
alignas(64) const double zero[8] = {};

// Weight and bias as the nests read them.
class Parameters {
 public:
  Parameters(const Table &table, const Plan &plan, const Job &job, Task &task)
      : compute_(job.dtype == F64 ? F64 : F32),
        scratch_(plan.nest.affine_size * element_size(compute_) *
                 (copied(plan, job.weight, job.weight_dtype, job.weight_offset, job.bias) +
                  copied(plan, job.bias, job.bias_dtype, 0, job.weight))),
        next_((char *)scratch_.data()) {
    const void *one = compute_ == F64 ? (const void *)double_one : float_one;
    task.weight = take(table, plan, job.weight, job.weight_dtype, job.weight_offset, job.bias, 1, one);
    task.bias = take(table, plan, job.bias, job.bias_dtype, 0, job.weight, 0, zero);
  }

 private:
  bool copied(const Plan &plan, const void *p, int32_t dtype, double offset,
              const void *other) const {
    if (!p) return other != nullptr;  // as many ones or zeros as the other one has elements
    return plan.order.loops || dtype != compute_ || offset != 0;
  }
  const void *take(const Table &table, const Plan &plan, const void *p, int32_t dtype,
                   double offset, const void *other, double missing, const void *constant) {
    if (!copied(plan, p, dtype, offset, other)) return p ? p : constant;
    void *out = next_;
    next_ += plan.nest.affine_size * element_size(compute_);
    if (p) {
      table.gather(compute_, dtype, p, &plan.order, offset, out);
    } else {
      for (int64_t i = 0; i < plan.nest.affine_size; i++)
        if (compute_ == F64) ((double *)out)[i] = missing;
        else ((float *)out)[i] = (float)missing;
    }
    return out;
  }

  int32_t compute_;
  Scratch scratch_;
  char *next_;
};

// The running statistics as the nests read them.
class GivenStatistics {
 public:
  GivenStatistics(const Table &table, Task &task)
      : scratch_(task.running_mean ? table.given_bytes(&task) : 0) {
    if (!task.running_mean) return;
    task.given = scratch_.data();
    table.give(&task, scratch_.data());
  }

 private:
  Scratch scratch_;
};

constexpr int64_t CHUNKS = 32;
constexpr int64_t SUMS = 8 << 20;  // bytes that the chunks' sums may need, if eight of them suffice

// How the sums for the parameters are laid out; returns their bytes.
int64_t lay_out_sums(const Nest &nest, Task &task) {
  task.chunk = 1;
  if (!nest.lanes && !nest.per_element) return nest.pieces * 2 * 8;
  if (nest.lanes && nest.per_element && !nest.mixed)
    return nest.units * 2 * ceil_div(nest.tile, 16) * 16 * 8;
  task.pitch = nest.lanes && !nest.mixed ? nest.affine_size * 16 : ceil_div(nest.affine_size, 16) * 16 + 16;
  const int64_t bytes = 2 * task.pitch * 8;
  int64_t chunks = SUMS / bytes;
  if (chunks > CHUNKS) chunks = CHUNKS;
  if (chunks < 8) chunks = 8;
  task.chunk = ceil_div(nest.units, chunks);
  return ceil_div(nest.units, task.chunk) * bytes;
}

// Whether each chunk of units adds to sums of its own.
bool has_chunk_sums(const Nest &nest, const Task &task) {
  return task.sums && (nest.lanes != nest.per_element || nest.mixed);
}
void zero_chunk(const Nest &nest, const Task &task, int64_t chunk) {
  if (!has_chunk_sums(nest, task)) return;
  const int64_t bytes = 2 * task.pitch * 8;
  memset((char *)task.sums + chunk * bytes, 0, (size_t)bytes);
}

// Whether two parts of a unit may add to the same element of a chunk's sums.
bool parts_share_sums(const Nest &nest, const Task &task) {
  if (!task.sums || !nest.lanes || (nest.per_element && !nest.mixed)) return false;
  for (int l = 0; l < nest.applied.loops; l++)
    if (!nest.applied.loop[l].step[AFFINE]) return true;
  return false;
}

// body(item) for the items of this thread.
template <class Body> void share(int64_t part, int64_t parts, int64_t items, const Body &body) {
  const int64_t end = items * (part + 1) / parts;
  for (int64_t i = items * part / parts; i < end; i++) body(i);
}
// Backwards: what this thread has read last is still in its cache.
template <class Body>
void share_back(int64_t part, int64_t parts, int64_t items, const Body &body) {
  const int64_t begin = items * part / parts;
  for (int64_t i = items * (part + 1) / parts; i-- > begin;) body(i);
}

Written written(const Nest &nest, bool backward) {
  return {nest.lanes ? nest.width : nest.applied.n, nest.lanes != 0, backward};
}

// All units, each by one thread, or if they are few their parts one step after the other. The results
// are the same: units and parts, and the order in which sums are merged, follow from the shape.
template <class Units, class Step, class Then>
void run(const Plan &plan, Task &task, int64_t slot_bytes, const Units &units,
         const Step &step, bool backward, const Then &then) {
  const Nest &nest = plan.nest;
  const int64_t chunks = ceil_div(nest.units, task.chunk);
  const int64_t sum_parts = backward ? nest.applied.parts : nest.measured.parts;
  const int64_t most = sum_parts > nest.applied.parts ? sum_parts : nest.applied.parts;
  const int threads = threads_for(chunks * most, nest.groups * nest.group_size);
  const bool whole = threads < 2 || most == 1 || chunks >= 2 * threads;
  task.slot = slot_bytes;
  Scratch slots(slot_bytes * (whole ? threads : nest.units) + 64);
  char *const base = (char *)slots.data();
  task.slots = whole ? nullptr : base;
  // In backward those of the gradient, in forward those of statistics that are not known yet.
  const bool sums = backward ? task.sums || !task.running_mean
                             : !task.running_mean && !task.job->grad;
  std::atomic<bool> again{false}, repair{false};
  parallel(threads, [&](int64_t part, int64_t parts) {
    const auto unit_end = [&](int64_t chunk) {
      const int64_t end = (chunk + 1) * task.chunk;
      return end < nest.units ? end : nest.units;
    };
    if (whole) {
      // As many units as possible in one go: they are measured together and fetched ahead.
      const int64_t begin = chunks * part / parts, end = chunks * (part + 1) / parts;
      const int64_t at_once = has_chunk_sums(nest, task) ? 1 : end - begin;
      for (int64_t chunk = begin; chunk < end; chunk += at_once) {
        zero_chunk(nest, task, chunk);
        units(chunk * task.chunk, unit_end(chunk + at_once - 1), base + part * slot_bytes);
      }
    } else {
      const auto wait = [&] { if (parts > 1) openmp().barrier(); };
      const auto single = [&](int which) {
        share(part, parts, chunks, [&](int64_t chunk) {
          if (which == START) zero_chunk(nest, task, chunk);
          for (int64_t u = chunk * task.chunk; u < unit_end(chunk); u++) {
            const int found = step(which, u, 0);
            if (found == 1) again = true;
            if (found == 2) repair = true;
          }
        });
        wait();
      };
      // Parts whose sums for a weight go to one place are done one after the other.
      const auto together = [&] {
        share(part, parts, chunks, [&](int64_t chunk) {
          for (int64_t u = chunk * task.chunk; u < unit_end(chunk); u++)
            for (int64_t p = 0; p < sum_parts; p++) step(SUM, u, p);
        });
        wait();
      };
      const auto many = [&](int which, int64_t of) {
        const auto one = [&](int64_t item) {
          const int64_t chunk = item / of;
          for (int64_t u = chunk * task.chunk; u < unit_end(chunk); u++) step(which, u, item % of);
        };
        if (which == APPLY) share_back(part, parts, chunks * of, one);
        else share(part, parts, chunks * of, one);
        wait();
      };
      single(START);
      if (sums) {
        if (parts_share_sums(nest, task)) together();
        else many(SUM, sum_parts);
        single(FINISH);
        if (again) {
          many(SUM, sum_parts);
          single(FINISH);
        }
      } else if (backward) {
        single(FINISH);
      }
      many(APPLY, nest.applied.parts);
      if (repair) single(REPAIR);
    }
    then(part, parts);
  });
}

}  // namespace

void forward(const Plan &plan, Job job, Task task) {
  if (plan.rows) {
    set_rows(plan, job);
    return forward(job);
  }
  const Table &table = *selection().current.load(std::memory_order_relaxed);
  task.job = &job;
  task.nest = &plan.nest;
  task.chunk = 1;
  set_access(job, plan.nest.groups * plan.nest.group_size, written(plan.nest, false), task.mask);
  const Parameters parameters(table, plan, job, task);
  const GivenStatistics given(table, task);
  run(
      plan, task, table.slot(&plan.nest),
      [&](int64_t u, int64_t end, void *slot) { table.forward_units(&task, u, end, slot); },
      [&](int which, int64_t u, int64_t p) { return table.forward_step(&task, which, u, p); },
      false, [](int64_t, int64_t) {});
}

void backward(const Plan &plan, Job job, Task task) {
  if (plan.rows) {
    set_rows(plan, job);
    return backward(job);
  }
  const Table &table = *selection().current.load(std::memory_order_relaxed);
  const Nest &nest = plan.nest;
  task.job = &job;
  task.nest = &nest;
  set_access(job, nest.groups * nest.group_size, written(nest, true), task.mask);
  const Parameters parameters(table, plan, job, task);
  const GivenStatistics given(table, task);
  const bool params = job.dweight || job.dbias;
  const int64_t sum_bytes = lay_out_sums(nest, task);
  Scratch sums(params ? sum_bytes : 0);
  task.sums = params ? sums.data() : nullptr;
  if (!params) task.chunk = 1;
  const int64_t size = plan.order.n;  // of the parameter as it is given
  Scratch merged(params ? (2 * nest.affine_size + size) * 8 : 0);
  double *const dweight = (double *)merged.data(), *const dbias = dweight + nest.affine_size;
  run(
      plan, task, table.slot(&nest),
      [&](int64_t u, int64_t end, void *slot) { table.backward_units(&task, u, end, slot); },
      [&](int which, int64_t u, int64_t p) { return table.backward_step(&task, which, u, p); },
      true, [&](int64_t part, int64_t parts) {
        if (!params) return;
        if (parts > 1) openmp().barrier();
        table.merge_affine(&task, dweight, dbias, nest.affine_size * part / parts,
                           nest.affine_size * (part + 1) / parts);
      });
  double *const added = dbias + nest.affine_size;
  if (job.dweight)
    table.scatter(job.weight_dtype, dweight, &plan.order, size, added, job.dweight);
  if (job.dbias) table.scatter(job.bias_dtype, dbias, &plan.order, size, added, job.dbias);
}

void move(const Running &running) {
  selection().current.load(std::memory_order_relaxed)->move(&running);
}

void widen(int64_t n, int32_t a_dtype, const void *a, int32_t b_dtype, const void *b, double *out) {
  const Table &table = *selection().current.load(std::memory_order_relaxed);
  Lines as_they_are = {};
  as_they_are.n = n;
  table.gather(F64, a_dtype, a, &as_they_are, 0, out);
  table.gather(F64, b_dtype, b, &as_they_are, 0, out + n);
}

const char *isa() { return selection().current.load()->name; }
const char *isa_error() { return selection().error.empty() ? nullptr : selection().error.c_str(); }
bool set_isa(const char *name) { return selection().set(name); }
const char *const *supported_isas() { return selection().names; }

int64_t stream_from(int64_t bytes) { return stream_limit.exchange(bytes); }
int64_t read_singly_from(int64_t bytes) { return single_limit.exchange(bytes); }

}  // namespace axisnorm
