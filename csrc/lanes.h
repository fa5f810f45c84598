// The nest of lanes: neighbours in memory belong to different groups, and a group steps over the
// reduced loops. LayerNorm2d of channels-first tensors; BatchNorm, InstanceNorm and GroupNorm of
// channels-last ones. A tile of lanes is done at once, so that its steps stay in the cache.
#pragma once

namespace {

// A unit under way: a tile. Arrays of `pitch` elements, one for each lane, in one block of memory.
template <class C> struct LaneUnit {
  int64_t lanes, pitch;
  int64_t ahead;           // from x of this unit to that of the next one, 0 if none is fetched
  int32_t passes, repair;  // repair: some lane has to be done again
  C *k, *hi, *lo, *shift, *rstd;
  C *first, *mean, *slope;       // backward; `first` shifts the sums
  double *count;                 // of valid elements of the lane's group
  double *sums;                  // for each part SUMS times `pitch`
  unsigned char *unsafe, *redo;  // the slow path: for all, or for dx

  static constexpr int SUMS = 5;
  double *part(int64_t p, int i) const { return sums + (SUMS * p + i) * pitch; }
  // Whole vectors are read beyond the last lane. Were denormal numbers to stand there, each
  // multiplication would take some 150 cycles: LayerNorm2d of 14 times 14 twice as long.
  void clear_beyond() {
    C *const arrays[] = {hi, shift, rstd};
    for (C *array : arrays)
      for (int64_t j = lanes; j < round_up(lanes, 16); j++) array[j] = 0;
  }
  Constants<C> constants() const { return {hi, shift, rstd}; }
};

inline int64_t lane_pitch(const Nest &nest) { return round_up(nest.tile, 16); }
inline int64_t lane_slot(const Nest &nest) {
  const int64_t pitch = lane_pitch(nest);
  return round_up((int64_t)sizeof(LaneUnit<double>), 64) +
         pitch * 8 * (9 + LaneUnit<double>::SUMS * nest.applied.parts) + round_up(2 * pitch, 64);
}
template <class C> LaneUnit<C> &lane_unit(const Nest &nest, void *slot) {
  LaneUnit<C> &u = *(LaneUnit<C> *)slot;
  u.pitch = lane_pitch(nest);
  char *p = (char *)slot + round_up((int64_t)sizeof(LaneUnit<double>), 64);
  C **const arrays[] = {&u.k, &u.hi, &u.lo, &u.shift, &u.rstd, &u.first, &u.mean, &u.slope};
  for (C **array : arrays) {
    *array = (C *)p;
    p += u.pitch * 8;
  }
  u.count = (double *)p;
  u.sums = u.count + u.pitch;
  u.unsafe = (unsigned char *)(u.sums + u.SUMS * nest.applied.parts * u.pitch);
  u.redo = u.unsafe + u.pitch;
  return u;
}

// Steps that are summed in the compute type, then in double. Where the result is a half again, they are
// as many bytes of it.
constexpr int64_t LANE_BLOCK = 16;
template <class T> constexpr int64_t lane_block = can_round<T> ? 2 * LANE_BLOCK : LANE_BLOCK;
constexpr int SAMPLES = 8;      // steps that give the shift of the sums
constexpr int AT_ONCE = VB == 64 ? 8 : 4;  // vectors of lanes: as many sums as fit into registers

template <int N> struct Number { static constexpr int value = N; };

// As many where some constants of every lane stand in registers, too: five of them, or three.
constexpr int FEW = VB == 64 ? 4 : 2, SOME = VB == 64 ? 8 : 4;

// As many as two sums each fit into registers, the constants being read from memory: whole steps of
// many tensors, which lie one after another.
constexpr int WHOLE = VB == 64 ? 12 : 6;

// body(Number<B>, Number<partial>, lane, tail): blocks of B vectors, at most `Most`, that cover the
// lanes. Of the last one, a partial vector, only `tail` lanes are there.
template <int W, int Most = AT_ONCE, class Body>
INLINE void each_block(int64_t lanes, const Body &body) {
  int64_t lane = 0;
  const auto block = [&](auto number) __attribute__((always_inline)) {
    body(number, Number<0>{}, lane, (int64_t)0);
    lane += decltype(number)::value * W;
  };
  while (lanes - lane >= Most * W) block(Number<Most>{});
  if (Most > 8 && lanes - lane >= 8 * W) block(Number<8>{});
  if (Most > 6 && lanes - lane >= 6 * W) block(Number<6>{});
  if (Most > 4 && lanes - lane >= 4 * W) block(Number<4>{});
  while (Most > 2 && lanes - lane >= 2 * W) block(Number<2>{});
  if (lanes - lane >= W) block(Number<1>{});
  if (lanes > lane) body(Number<1>{}, Number<1>{}, lane, lanes - lane);
}

// A block of B vectors of lanes; the last one is partial where a tail is given, and stands alone then.
// Pairs are taken two vectors at a time.
template <class T, int B, bool Partial> struct Block {
  typedef Vector<T> V;
  static constexpr int W = lanes<T>, ONCE = in_pairs<T> && B > 1 ? 2 : 1;
  const int64_t tail;

  // ONCE vectors of a tensor
  INLINE void take(const T *p, V *v) const {
    if constexpr (ONCE == 2) load_two(p, v);
    else *v = Partial ? load(p, tail) : load(p);
  }
  INLINE void put(T *p, const V *v, bool streamed) const {
    if constexpr (ONCE == 2) write_two(p, v, streamed);
    else if (Partial) store(p, *v, tail);
    else write(p, *v, streamed);
  }
  // what belongs to each of the lanes
  INLINE void constants(const Scalar<T> *p, V v[B]) const {
    for (int j = 0; j < B; j++) v[j] = Partial ? load(p, tail) : load(p + j * W);
    if constexpr (ONCE == 2)
      for (int j = 0; j < B; j += 2) deal(v + j);
  }
  // the sums of each of them, with their rounding errors or without
  INLINE void add(double *sums, double *rests, V v[B]) const {
    in_order(v);
    for (int j = 0; j < B; j++) add_to(sums + j * W, rests + j * W, v[j]);
  }
  INLINE void add(double *sums, V v[B]) const {
    in_order(v);
    for (int j = 0; j < B; j++) add_to(sums + j * W, v[j]);
  }
  static INLINE void in_order(V v[B]) {
    if constexpr (ONCE == 2)
      for (int j = 0; j < B; j += 2) collect(v + j);
  }
};

template <class T> struct OfLanes {
  typedef Scalar<T> C;
  typedef Vector<T> V;
  typedef LaneUnit<C> Unit;
  static constexpr int TOGETHER = 1;
  static constexpr int W = lanes<T>;

  const Task &task;
  const Job &job = *task.job;
  const Nest &nest = *task.nest;
  const bool center = job.center, rounded = can_round<T> && job.rounded;
  const C *const weight = (const C *)task.weight, *const bias = (const C *)task.bias;

  Place place(int64_t unit) const {
    Place p = {};
    seek(p, nest.kept, nest.kept_loops, unit / nest.tiles);
    const int64_t lane = unit % nest.tiles * nest.tile;
    p.at[X] += lane;
    p.at[Y] += lane;
    p.at[GRAD] += lane;
    p.at[DX] += lane;
    p.at[MASK] += lane * nest.mask_step;
    p.at[AFFINE] += lane * nest.per_element;
    p.at[STATS] += lane / nest.fold * nest.stats_step;
    p.at[RUNNING] += lane / nest.fold * nest.running_step;
    return p;
  }
  void places(int64_t unit, int, Place *at) const { *at = place(unit); }
  Unit &unit_in(void *slot, int64_t unit) const {
    Unit &u = lane_unit<C>(nest, slot);
    u.ahead = 0;
    u.lanes = smaller(nest.tile, nest.width - unit % nest.tiles * nest.tile);
    u.clear_beyond();
    return u;
  }
  static int together() { return TOGETHER; }
  bool fetches() const { return fetches_ahead<T>(job, nest, nest.tile * nest.applied.count); }
  static Unit &unit_again(void *slot) { return *(Unit *)slot; }
  const T *x(const Place &p) const { return (const T *)job.x + p.at[X]; }
  const T *grad(const Place &p) const { return (const T *)job.grad + p.at[GRAD]; }
  const unsigned char *mask(const Place &p) const { return task.mask + p.at[MASK]; }

  // f(place) for each step of a part.
  template <class F> INLINE void each_step(const Place &at, int64_t part, const F &f) const {
    each_piece(nest.applied, at, part,
               [&](const Place &p, int64_t, int64_t, int64_t)
                   __attribute__((always_inline)) { f(p); });
  }
  template <class F> INLINE void every_step(const Place &at, const F &f) const {
    each_line(nest.applied, at, 0, nest.applied.count,
              [&](const Place &p, int64_t) __attribute__((always_inline)) { f(p); });
  }

  // f(place, loop, steps) for up to `most` steps of a part at a time, which follow each other along the
  // loop.
  template <class F>
  INLINE void each_chunk(const Place &at, int64_t part, int64_t most, const F &f) const {
    const Lines &lines = nest.applied;
    const int64_t begin = part * lines.per_part;
    each_run(lines, at, begin, smaller(lines.count, begin + lines.per_part),
             [&](Place &p, int64_t i, int64_t stop, const Loop &along)
                 __attribute__((always_inline)) {
               for (;;) {
                 const int64_t steps = smaller(most, stop - i);
                 f(p, along, steps);
                 i += steps;
                 advance(p, along, i == stop ? steps - 1 : steps);
                 if (i == stop) break;
               }
             });
  }

  // How many steps some vectors of lanes take before the next ones take theirs. All of a part: with 16
  // at a time BatchNorm in channels_last took a tenth longer. But what is written to in steps that begin
  // within a line of the cache is to come back while that line is near, and lines that lie whole pages
  // apart contend for one place in the first cache.
  // Vectors of less than a line take 16 steps always: all of them took a quarter longer.
  static constexpr bool WHOLE_PARTS = VB == 64;
  int64_t all_steps(int64_t block) const { return WHOLE_PARTS ? nest.applied.per_part : block; }
  int64_t some_steps() const {
    const Lines &lines = nest.applied;
    const int64_t step = lines.loops ? lines.loop[lines.loops - 1].step[X] : 0;
    const int64_t apart = step * (int64_t)sizeof(T);
    return apart % 64 == 0 && apart % 4096 ? all_steps(lane_block<T>) : lane_block<T>;
  }
  // f(steps) for so many that are summed in the compute type.
  template <class F> static INLINE void each_total(int64_t steps, int64_t most, const F &f) {
    if (!WHOLE_PARTS) return f(steps);
    for (; steps > 0; steps -= most) f(smaller(most, steps));
  }

  // Blocks for sums. A processor that fetches what comes next by itself wants to see memory read in
  // order: whole steps where they fit and follow each other, or BatchNorm of 96 channels takes half as
  // long again.
  template <int Most, class Body>
  INLINE void each_sum(int64_t lanes, const Loop &along, const Body &body) const {
    if (job.singly && along.step[X] == lanes) each_block<W, WHOLE>(lanes, body);
    else each_block<W, Most>(lanes, body);
  }

  // Adds up the lanes of a group and gives each of them the sum.
  void fold(double *values, int64_t lanes) const {
    for (int64_t j = 0; nest.fold > 1 && j < lanes; j += nest.fold) {
      double total = 0;
      for (int64_t i = j; i < j + nest.fold; i++) total += values[i];
      for (int64_t i = j; i < j + nest.fold; i++) values[i] = total;
    }
  }

  NOINLINE void count(const Place &at, Unit &u) const {
    const int64_t all = task.mask ? 0 : u.lanes;
    const double size = (double)nest.group_size;
    for (int64_t j = 0; j < all; j++) u.count[j] = size;
    for (int64_t j = all; j < u.pitch; j++) u.count[j] = 0;
    if (!task.mask) return;
    every_step(at, [&](const Place &p) {
      const unsigned char *m = mask(p);
      for (int64_t j = 0; j < u.lanes; j++) u.count[j] += m[j * nest.mask_step] != 0;
    });
    fold(u.count, u.lanes);
  }

  // Forward: the sums, then their rounding errors, in all parts; into the first part.
  void merge_forward(const Unit &u) const {
    if (same<C, float>) return merge_parts(u, 2);  // double is better than enough
    double *s = u.part(0, 0), *q = u.part(0, 1), *s_rest = u.part(0, 2), *q_rest = u.part(0, 3);
    for (int64_t p = 1; p < nest.applied.parts; p++)
      for (int64_t j = 0; j < u.pitch; j++) {
        add_to(s + j, s_rest + j, u.part(p, 0)[j]);
        add_to(q + j, q_rest + j, u.part(p, 1)[j]);
        s_rest[j] += u.part(p, 2)[j];
        q_rest[j] += u.part(p, 3)[j];
      }
    for (int64_t j = 0; j < u.pitch; j++) {
      // Not where a sum is infinite: its error is not a number.
      if (finite(s[j])) s[j] += s_rest[j];
      if (finite(q[j])) q[j] += q_rest[j];
    }
  }
  void merge_parts(const Unit &u, int sums) const {
    for (int i = 0; i < sums; i++)
      for (int64_t p = 1; p < nest.applied.parts; p++)
        for (int64_t j = 0; j < u.pitch; j++) u.part(0, i)[j] += u.part(p, i)[j];
  }

  // Statistics that the compute type cannot hold contribute nothing to vector sums.
  void take_out_unsafe(Unit &u, bool unsafe) const {
    const int64_t n = u.lanes;
    for (int64_t j = 0; unsafe && j < n; j++)
      if (u.unsafe[j]) u.hi[j] = u.lo[j] = u.rstd[j] = 0;
    for (int64_t j = 0; j < n; j++) u.shift[j] = -u.lo[j] * u.rstd[j];
  }
  // Whether the statistics of the lanes follow each other in memory, one for each lane.
  bool in_a_row() const { return nest.fold == 1 && nest.stats_step == 1; }

  // Saved statistics, all at once. False: some are unsafe, or they do not follow each other.
  bool take_saved(const Place &at, Unit &u) const {
    if (task.running_mean || !in_a_row()) return false;
    const C *saved = (const C *)job.stats + at.at[STATS];
    C *const arrays[] = {u.hi, u.lo, u.rstd};
    for (C *array : arrays) {
      memcpy(array, saved, (size_t)u.lanes * sizeof(C));
      saved += nest.groups;
    }
    constexpr int D = lanes<double>;
    vl unsafe = {};
    for (int64_t j = 0; j < u.lanes; j += D)
      unsafe |= is_unsafe<C>(load_as_double(u.hi + j), load_as_double(u.lo + j),
                             load_as_double(u.rstd + j)) & (load(u.count + j) > vd{});
    return !any(unsafe);
  }
  // Running or saved statistics.
  NOINLINE void take_known(const Place &at, Unit &u) const {
    if (take_saved(at, u)) return take_out_unsafe(u, false);
    Known<C> known(task, at);
    bool any_unsafe = false;
    for (int64_t j = 0; j < u.lanes; j += nest.fold) {
      const C hi = known.hi(), lo = known.lo(), rstd = known.rstd();
      const bool unsafe = !known.is_safe() && (task.running_mean || u.count[j] > 0);
      for (int64_t i = j; i < j + nest.fold; i++) {
        u.hi[i] = hi;
        u.lo[i] = lo;
        u.rstd[i] = rstd;
        u.unsafe[i] = unsafe;
      }
      any_unsafe |= unsafe;
      known.step();
    }
    take_out_unsafe(u, any_unsafe);
    u.repair = any_unsafe;
  }

  // ---- forward

  NOINLINE void start(const Place &at, Unit &u) const {
    u.passes = u.repair = 0;
    memset(u.unsafe, 0, (size_t)u.pitch);
    count(at, u);
    if (knows_statistics(task)) return take_known(at, u);
    memset(u.k, 0, (size_t)u.pitch * sizeof(C));
    if (!center) return;
    if (task.mask) shift_masked(at, u);
    else shift(at, u);
    share_in_group(u.k, u.lanes);
  }

  // The lanes of a group take the mean of what they have, exactly that if it is the same.
  void share_in_group(C *values, int64_t lanes) const {
    for (int64_t j = 0; nest.fold > 1 && j < lanes; j += nest.fold) {
      const C first = values[j];
      double more = 0;
      for (int64_t i = j; i < j + nest.fold; i++) more += (double)(values[i] - first);
      const C mean = first + (C)(more / (double)nest.fold);
      for (int64_t i = j; i < j + nest.fold; i++) values[i] = mean;
    }
  }

  // k: a shift that lies near the mean of x.
  void shift(const Place &at, Unit &u) const {
    sample(at, u, u.k, [&](const Place &p, int64_t j, int64_t tail) __attribute__((always_inline)) {
      return tail ? load(x(p) + j, tail) : load(x(p) + j);
    });
  }
  // The mean of some steps all over the group, exactly their common value if they are equal.
  template <class Value>
  NOINLINE void sample(const Place &at, const Unit &u, C *out, const Value &value) const {
    const int64_t steps = nest.applied.count, samples = smaller(SAMPLES, steps);
    Place place[SAMPLES];
    for (int64_t s = 0; s < samples; s++) {
      place[s] = at;
      seek(place[s], nest.applied.loop, nest.applied.loops, s * steps / samples);
    }
    const C part = (C)1 / (C)samples;
    const auto mean = [&](int64_t j, int64_t tail) __attribute__((always_inline)) {
      const V first = value(place[0], j, tail);
      V more = {};
      for (int64_t s = 1; s < samples; s++) more += value(place[s], j, tail) - first;
      store(out + j, first + more * part);
    };
    int64_t j = 0;
    for (; j + W <= u.lanes; j += W) mean(j, 0);
    if (j < u.lanes) mean(j, u.lanes - j);
  }
  // k: the first valid element of each lane.
  NOINLINE void shift_masked(const Place &at, Unit &u) const {
    int64_t missing = u.lanes;
    memset(u.redo, 0, (size_t)u.pitch);
    every_step(at, [&](const Place &p) {
      if (!missing) return;
      for (int64_t j = 0; j < u.lanes; j++) {
        if (u.redo[j] || !mask(p)[j * nest.mask_step]) continue;
        u.k[j] = (C)get(x(p) + j);
        u.redo[j] = 1;
        missing--;
      }
    });
    // A lane without a valid element takes the shift of another one of its group.
    for (int64_t j = 0; nest.fold > 1 && j < u.lanes; j += nest.fold) {
      int64_t valid = j;
      while (valid + 1 < j + nest.fold && !u.redo[valid]) valid++;
      for (int64_t i = j; i < j + nest.fold; i++)
        if (!u.redo[i]) u.k[i] = u.k[valid];
    }
  }

  NOINLINE void sum(const Place &at, Unit &u, int64_t part) const {
    double *s = u.part(part, 0), *q = u.part(part, 1);
    double *s_rest = u.part(part, 2), *q_rest = u.part(part, 3);
    memset(s, 0, (size_t)u.pitch * (same<C, float> ? 2 : 4) * sizeof *s);
    if (task.mask) return sum_masked(at, u, part);
    each_chunk(at, part, all_steps(lane_block<T>),
               [&](const Place &p, const Loop &along, int64_t steps)
                                          __attribute__((noinline)) {
      const int64_t step = along.step[X];
      each_sum<AT_ONCE>(u.lanes, along, [&](auto number, auto partial, int64_t lane,
                                            int64_t tail) __attribute__((always_inline)) {
        constexpr int B = decltype(number)::value;
        constexpr bool Partial = decltype(partial)::value;
        const Block<T, B, Partial> block = {tail};
        V k[B];
        block.constants(u.k + lane, k);
        const T *v = x(p) + lane;
        each_total(steps, lane_block<T>, [&](int64_t steps) __attribute__((always_inline)) {
          V sums[B] = {}, squares[B] = {};
          for (; steps; steps--, v += step) {
#pragma GCC unroll 16
            for (int j = 0; j < B; j += block.ONCE) {
              V d[block.ONCE];
              block.take(v + j * W, d);
              for (int i = 0; i < block.ONCE; i++) {
                d[i] -= k[j + i];
                sums[j + i] += d[i];
                squares[j + i] = fma(d[i], d[i], squares[j + i]);
              }
            }
          }
          block.add(s + lane, s_rest + lane, sums);
          block.add(q + lane, q_rest + lane, squares);
        });
      });
    });
  }
  NOINLINE void sum_masked(const Place &at, Unit &u, int64_t part) const {
    double *s = u.part(part, 0), *q = u.part(part, 1);
    double *s_rest = u.part(part, 2), *q_rest = u.part(part, 3);
    each_step(at, part, [&](const Place &p) {
      const unsigned char *m = mask(p);
      for (int64_t begin = 0; begin < u.lanes; begin += STAGED) {
        C staged[STAGED];
        const int64_t n = smaller(STAGED, u.lanes - begin);
        stage(x(p) + begin, m + begin * nest.mask_step, nest.mask_step, n, (C)0, staged);
        for (int64_t j = 0; j < n; j++) {
          const double d = m[(begin + j) * nest.mask_step]
                               ? (double)(staged[j] - u.k[begin + j]) : 0.0;
          if (same<C, float>) {
            s[begin + j] += d;
            q[begin + j] += d * d;
          } else {
            add_to(s + begin + j, s_rest + begin + j, d);
            add_to(q + begin + j, q_rest + begin + j, d * d);
          }
        }
      }
    });
  }

  NOINLINE int finish(const Place &at, Unit &u) const {
    merge_forward(u);
    double *s = u.part(0, 0), *q = u.part(0, 1);
    if (!center) memset(s, 0, (size_t)u.pitch * sizeof *s);
    fold(s, u.lanes);
    fold(q, u.lanes);
    if (center && u.passes++ == 0) {
      // The shift is more than 1.5 deviations off (half of one in double, see settle_rows), or not a
      // number.
      constexpr double factor = same<C, double> ? 5 : 13.0 / 9.0;
      constexpr int D = lanes<double>;
      const vd zero = {};
      vl again = {};
      for (int64_t j = 0; j < round_up(u.lanes, D); j += D) {
        const vd sum = load(s + j), count = load(u.count + j);
        again |= (count > zero) & ~(factor * sum * sum <= count * load(q + j));
      }
      if (any(again)) {
        for (int64_t j = 0; j < u.lanes; j++)
          if (u.count[j] > 0 && !(factor * s[j] * s[j] <= u.count[j] * q[j]))
            u.k[j] += (C)(s[j] / u.count[j]);
        return 1;
      }
    }
    double *var = u.part(0, 4);
    const bool unsafe = settle_lanes<false>(u, s, q, var);
    if (unsafe) settle_lanes<true>(u, s, q, var);
    for (int64_t j = 0; unsafe && j < u.lanes; j += nest.fold) {
      if (!u.unsafe[j]) continue;
      const Exact<T> exact = exact_group<T>(task, at, j, nest.fold, u.count[j]);
      exact.save(&u.hi[j], &u.lo[j], &u.rstd[j]);
      var[j] = exact.var;
    }
    save_lanes(at, u, var);
    take_out_unsafe(u, unsafe);
    u.repair = unsafe;
    return unsafe ? 2 : 0;
  }

  // hi, lo, rstd and the variance of each lane from the sums around k; whether some are unsafe. Which
  // ones is seldom asked, and takes as long as all the rest.
  template <bool Which>
  NOINLINE bool settle_lanes(Unit &u, const double *s, const double *q, double *var) const {
    constexpr int D = lanes<double>;
    constexpr bool Quick = same<C, float>;
    auto sizes = sizes_of<Quick>(task, broadcast(task.mask ? 0.0 : (double)nest.group_size));
    vl unsafe = {};
    for (int64_t j = 0; j < round_up(u.lanes, D); j += D) {
      const vd count = load(u.count + j);
      if (task.mask) sizes = sizes_of<Quick>(task, count);
      const vl redo = settle_some(task, load(s + j), load(q + j), sizes, u.k + j, u.hi + j,
                                  u.lo + j, u.rstd + j, var + j) & (count > vd{});
      unsafe |= redo;
      for (int i = 0; Which && i < D; i++) u.unsafe[j + i] = redo[i] != 0;
    }
    return any(unsafe);
  }

  void save_lanes(const Place &at, const Unit &u, const double *var) const {
    if (!job.stats && !job.var && !task.count) return;
    int64_t index = at.at[STATS];
    if (in_a_row()) {
      const auto save = [&](auto *to, const auto *from) {
        if (to) memcpy(to + index, from, (size_t)u.lanes * sizeof *to);
      };
      C *const stats = (C *)job.stats;
      save(stats, u.hi);
      save(stats ? stats + nest.groups : nullptr, u.lo);
      save(stats ? stats + 2 * nest.groups : nullptr, u.rstd);
      save(job.var, var);
      return save(task.count, u.count);
    }
    for (int64_t j = 0; j < u.lanes; j += nest.fold, index += nest.stats_step)
      save_statistics(task, index, u.hi[j], u.lo[j], u.rstd[j], var[j], u.count[j]);
  }

  struct Guesses {};
  template <class... Any> static bool forward_together(const Any &...) { return false; }
  static bool backward_together(const Place *, int, int64_t) { return false; }
  static void forward_in_order(int64_t, int64_t) {}

  void apply(const Place &at, const Unit &u, int64_t part) const {
    if (!job.y) return;
    if (job.activation)
      return nest.per_element ? activate<true>(at, u, part) : activate<false>(at, u, part);
    if (nest.per_element) apply_to<true>(at, u, part);
    else apply_to<false>(at, u, part);
  }
  template <bool PerElement>
  void apply_to(const Place &at, const Unit &u, int64_t part) const {
    if (task.mask) apply_masked<PerElement>(at, u, part);
    else if (nest.mixed) apply_chunks<PerElement, true>(at, u, part);
    else apply_chunks<PerElement, false>(at, u, part);
  }
  template <bool PerElement>
  NOINLINE void apply_masked(const Place &at, const Unit &u, int64_t part) const {
    each_step(at, part, [&](const Place &p) {
      T *y = (T *)job.y + p.at[Y];
      apply_line<T, true, PerElement>(x(p), y, u.lanes, u.constants(),
                                      task.running_mean != nullptr, rounded,
                                      weight + p.at[AFFINE], bias + p.at[AFFINE], 0, false);
      zero_masked(y, mask(p), nest.mask_step, u.lanes);
    });
  }
  template <bool PerElement>
  NOINLINE void activate(const Place &at, const Unit &u, int64_t part) const {
    each_step(at, part, [&](const Place &p) {
      T *y = (T *)job.y + p.at[Y];
      each_strip(job, job.grad ? grad(p) : nullptr, y, u.lanes, [&](int64_t i, int64_t k, C *z) {
        const int64_t e = p.at[AFFINE] + (PerElement ? i : 0);
        apply_line<T, true, PerElement>(x(p) + i, z, k, {u.hi + i, u.shift + i, u.rstd + i},
                                        task.running_mean != nullptr, rounded, weight + e, bias + e,
                                        u.ahead, false);
      });
      if (task.mask) zero_masked(y, mask(p), nest.mask_step, u.lanes);
    });
  }
  // The constants of some lanes stay in registers for some steps. Loaded at every step, they would
  // wait for stores to y whose addresses end in the same 12 bits: twice as slow.
  template <bool PerElement, bool Mixed>
  NOINLINE void apply_chunks(const Place &at, const Unit &u, int64_t part) const {
    constexpr bool Own = PerElement && !Mixed;
    each_chunk(at, part, some_steps(), [&](const Place &p, const Loop &along, int64_t steps)
                                           __attribute__((noinline)) {
      // Here, in registers: beside the stores it would be read again for each vector.
      const bool given = task.running_mean && !rounded, rounds = rounded;
      const bool streamed = job.streamed;
      const int64_t ahead = u.ahead, x_step = along.step[X], y_step = along.step[Y];
      const int64_t affine_step = along.step[AFFINE];
      const bool usual = !given && !rounds && !streamed && !ahead;
      each_block<W, Own ? FEW : SOME>(u.lanes, [&](auto number, auto partial, int64_t lane,
                                                   int64_t tail) __attribute__((always_inline)) {
        constexpr int B = decltype(number)::value;
        constexpr bool Partial = decltype(partial)::value;
        const Block<T, B, Partial> block = {tail};
        V hi[B], shift[B], rstd[B], w[B], b[B];
        block.constants(u.hi + lane, hi);
        block.constants(u.shift + lane, shift);
        block.constants(u.rstd + lane, rstd);
        if (Own) {
          block.constants(weight + p.at[AFFINE] + lane, w);
          block.constants(bias + p.at[AFFINE] + lane, b);
        }
        const T *v = x(p) + lane;
        T *y = (T *)job.y + p.at[Y] + lane;
        const C *ws = weight + p.at[AFFINE], *bs = bias + p.at[AFFINE];
        const auto each_of = [&](auto usual) __attribute__((always_inline)) {
          constexpr bool Usual = decltype(usual)::value;
          for (int64_t step = 0; step < steps; step++) {
            const bool past = !Usual && streamed && can_stream(y);
            const V all_w = Own || Mixed ? V{} : broadcast(*ws);
            const V all_b = Own || Mixed ? V{} : broadcast(*bs);
            if (Mixed) {
              block.constants(ws + lane, w);
              block.constants(bs + lane, b);
            }
#pragma GCC unroll 16
            for (int j = 0; j < B; j += block.ONCE) {
              if (!Usual && ahead) fetch(v + j * W + ahead);
              V r[block.ONCE];
              block.take(v + j * W, r);
              for (int i = 0; i < block.ONCE; i++) {
                const V wj = Own || Mixed ? w[j + i] : all_w, bj = Own || Mixed ? b[j + i] : all_b;
                r[i] -= hi[j + i];
                if (!Usual && given) {
                  // Running statistics do not bound xhat: it may overflow where xhat * weight does not.
                  r[i] = fma(r[i], rstd[j + i] * wj, fma(shift[j + i], wj, bj));
                } else {
                  r[i] = fma(r[i], rstd[j + i], shift[j + i]);
                  if (can_round<T> && !Usual && rounds) r[i] = round_as<T>(r[i]);
                  r[i] = fma(r[i], wj, bj);
                }
              }
              block.put(y + j * W, r, past);
            }
            v += x_step, y += y_step, ws += affine_step, bs += affine_step;
          }
        };
        if (usual) each_of(Number<1>{});
        else each_of(Number<0>{});
      });
    });
  }

  NOINLINE void repair(const Place &at, const Unit &u) const {
    for (int64_t j = 0; job.y && j < u.lanes; j += nest.fold) {
      if (!u.unsafe[j]) continue;
      if (task.running_mean)
        forward_by<T>(task, Given(task, at.at[RUNNING] + j / nest.fold * nest.running_step), at, j,
                      nest.fold);
      else
        forward_by<T>(task, exact_group<T>(task, at, j, nest.fold, u.count[j]), at, j, nest.fold);
    }
  }

  // ---- backward

  NOINLINE void start_backward(const Place &at, Unit &u) const {
    u.repair = 0;
    memset(u.unsafe, 0, (size_t)u.pitch);
    memset(u.redo, 0, (size_t)u.pitch);
    memset(u.first, 0, (size_t)u.pitch * sizeof(C));
    memset(u.mean, 0, (size_t)u.pitch * sizeof(C));
    memset(u.slope, 0, (size_t)u.pitch * sizeof(C));
    count(at, u);
    take_known(at, u);
    if (task.mask) return sample_masked(at, u);
    // The sums are of grad - first, or where weights change along the steps of grad * weight - first.
    const bool own = nest.per_element && !nest.mixed;
    sample(at, u, u.first, [&](const Place &p, int64_t j, int64_t tail)
                               __attribute__((always_inline)) {
      const V g = tail ? load(grad(p) + j, tail) : load(grad(p) + j);
      const C *w = weight + p.at[AFFINE];
      return own ? g : g * (nest.mixed ? Parameter<true, C>(w)(j, tail) : broadcast(*w));
    });
    if (!own) share_in_group(u.first, u.lanes);
  }

  // first: the first valid grad * weight of each group.
  NOINLINE void sample_masked(const Place &at, Unit &u) const {
    every_step(at, [&](const Place &p) {
      for (int64_t j = 0; j < u.lanes; j++) {
        const int64_t group = j / nest.fold * nest.fold;
        if (u.redo[group] || !mask(p)[j * nest.mask_step]) continue;
        u.first[group] = (C)get(grad(p) + j) * weight[p.at[AFFINE] + j * nest.per_element];
        u.redo[group] = 1;
      }
    });
    for (int64_t j = 0; j < u.lanes; j++) u.first[j] = u.first[j / nest.fold * nest.fold];
    memset(u.redo, 0, (size_t)u.pitch);
  }

  // Of grad * weight and of that times xhat; of grad * xhat where that is rounded or masked; of grad.
  int backward_sums() const { return task.mask ? 4 : rounded ? 3 : 2; }

  double *unit_sums(int64_t unit) const {  // PerElement: of grad * xhat, then of grad
    return (double *)task.sums + unit * 2 * lane_pitch(nest);
  }
  double *chunk_sums(int64_t unit) const {
    return (double *)task.sums + unit / task.chunk * 2 * task.pitch;
  }

  void sum_backward(const Place &at, Unit &u, int64_t part, int64_t unit) const {
    double *s1 = u.part(part, 0), *s2 = u.part(part, 1), *s3 = u.part(part, 2);
    memset(s1, 0, (size_t)(u.pitch * backward_sums()) * sizeof *s1);
    const bool shared = !nest.per_element || nest.mixed;
    double *const for_weight = shared && task.sums ? chunk_sums(unit) : nullptr;
    double *const for_bias = for_weight + (for_weight ? task.pitch : 0);
    if (task.mask) sum_masked_backward(at, u, part, for_weight, for_bias);
    else if (nest.mixed) sum_mixed(at, u, part, for_weight, for_bias);
    else if (at_once() && job.dx)
      sum_gradients<true, true>(at, u, part, s1, s2, s3, nullptr, nullptr);
    else if (nest.per_element)
      sum_gradients<true, false>(at, u, part, s1, s2, s3, nullptr, nullptr);
    else sum_gradients<false, false>(at, u, part, s1, s2, s3, for_weight, for_bias);
  }
  // AtOnce: dx, which does not depend on the sums, is written along with them.
  template <bool PerElement, bool AtOnce>
  NOINLINE void sum_gradients(const Place &at, const Unit &u, int64_t part, double *s1, double *s2,
                              double *s3, double *for_weight, double *for_bias) const {
    // With weights of their own a few lanes have all their constants in registers; else many lanes
    // share the sums of a step.
    constexpr int MANY = PerElement ? FEW : AT_ONCE;
    const int64_t most = PerElement ? all_steps(LANE_BLOCK) : LANE_BLOCK;
    each_chunk(at, part, most, [&](const Place &p, const Loop &along, int64_t steps)
                                   __attribute__((noinline)) {
      const bool rounds = rounded, streamed = job.streamed;
      const int64_t x_step = along.step[X], grad_step = along.step[GRAD];
      const int64_t dx_step = along.step[DX], affine_step = along.step[AFFINE];
      const auto each = [&](const auto &body) __attribute__((always_inline)) {
        if (PerElement) each_sum<MANY>(u.lanes, along, body);
        else each_block<W, MANY>(u.lanes, body);
      };
      each([&](auto number, auto partial, int64_t lane, int64_t tail)
                                       __attribute__((always_inline)) {
        constexpr int B = decltype(number)::value;
        constexpr bool Partial = decltype(partial)::value;
        constexpr bool Third = can_round<T> && PerElement;
        const Block<T, B, Partial> block = {tail};
        V first[B], hi[B], shift[B], rstd[B], factor[B];
        // Beyond the last lane there are zeros: the sums of a step run over whole vectors.
        block.constants(u.first + lane, first);
        block.constants(u.hi + lane, hi);
        block.constants(u.shift + lane, shift);
        block.constants(u.rstd + lane, rstd);
        if (AtOnce) block.constants(weight + p.at[AFFINE] + lane, factor);
        const T *v = x(p) + lane, *g = grad(p) + lane;
        T *dx = AtOnce ? (T *)job.dx + p.at[DX] + lane : nullptr;
        int64_t affine = p.at[AFFINE];
        each_total(steps, LANE_BLOCK, [&](int64_t steps) __attribute__((always_inline)) {
          V a1[B] = {}, a2[B] = {}, a3[B] = {};
          for (; steps; steps--) {
            const V w = PerElement ? V{} : broadcast(weight[affine]);
            V by_weight = {}, by_bias = {};
            const bool past = AtOnce && streamed && can_stream(dx);
#pragma GCC unroll 8
            for (int j = 0; j < B; j += block.ONCE) {
              V gs[block.ONCE], vs[block.ONCE];
              block.take(g + j * W, gs);
              block.take(v + j * W, vs);
              for (int i = 0; i < block.ONCE; i++) {
                const int k = j + i;
                const V gi = gs[i], gw = PerElement ? gi : gi * w;
                V vi = fma(vs[i] - hi[k], rstd[k], shift[k]);
                a1[k] += gw - first[k];
                a2[k] = fma(vi, gw, a2[k]);
                if (can_round<T> && rounds) vi = round_as<T>(vi);
                if (Third && rounds) a3[k] = fma(vi, gi, a3[k]);
                if (AtOnce) gs[i] = gi * factor[k] * rstd[k];
                if (!PerElement) {
                  by_weight = k ? fma(vi, gi, by_weight) : vi * gi;
                  by_bias = k ? by_bias + gi : gi;
                }
              }
              if (AtOnce) block.put(dx + j * W, gs, past);
            }
            if (!PerElement && for_weight) {
              add_to(for_weight + affine * 16, by_weight);
              add_to(for_bias + affine * 16, by_bias);
            }
            v += x_step, g += grad_step, affine += affine_step;
            if (AtOnce) dx += dx_step;
          }
          block.add(s1 + lane, a1);
          block.add(s2 + lane, a2);
          if (Third && rounds) block.add(s3 + lane, a3);
        });
      });
    });
  }

  // The weight changes along the lanes and from step to step.
  NOINLINE void sum_mixed(const Place &at, Unit &u, int64_t part, double *for_weight,
                          double *for_bias) const {
    double *s1 = u.part(part, 0), *s2 = u.part(part, 1);
    const Standardize<T, true> standardized(u.constants());
    each_step(at, part, [&](const Place &p) __attribute__((always_inline)) {
      const T *v = x(p), *g = grad(p);
      const C *w = weight + p.at[AFFINE];
      double *dw = for_weight + p.at[AFFINE], *db = for_bias + p.at[AFFINE];
      const auto add = [&](int64_t j, int64_t tail) __attribute__((always_inline)) {
        const V gj = tail ? load(g + j, tail) : load(g + j);
        V vj = standardized(tail ? load(v + j, tail) : load(v + j), j, tail);
        const V gw = gj * Parameter<true, C>(w)(j, tail);
        add_to(s1 + j, gw - load(u.first + j));
        add_to(s2 + j, vj * gw);
        if (!for_weight) return;
        if (can_round<T> && rounded) vj = round_as<T>(vj);
        add_to(dw + j, vj * gj);  // the sums end in a whole vector
        add_to(db + j, gj);
      };
      int64_t j = 0;
      for (; j + W <= u.lanes; j += W) add(j, 0);
      if (j < u.lanes) add(j, u.lanes - j);
    });
  }

  NOINLINE void sum_masked_backward(const Place &at, Unit &u, int64_t part, double *for_weight,
                                    double *for_bias) const {
    double *s1 = u.part(part, 0), *s2 = u.part(part, 1), *s3 = u.part(part, 2);
    double *s4 = u.part(part, 3);
    each_step(at, part, [&](const Place &p) {
      const unsigned char *m = mask(p);
      const C *const w = weight + p.at[AFFINE];
      double by_weight = 0, by_bias = 0;
      for (int64_t begin = 0; begin < u.lanes; begin += STAGED) {
        const int64_t n = smaller(STAGED, u.lanes - begin);
        C gs[STAGED], vs[STAGED];
        stage(grad(p) + begin, m + begin * nest.mask_step, nest.mask_step, n, (C)0, gs);
        stage(x(p) + begin, m + begin * nest.mask_step, nest.mask_step, n, (C)0, vs);
        for (int64_t i = 0; i < n; i++) {
          const int64_t j = begin + i;
          if (!m[j * nest.mask_step]) continue;
          const double xhat = (double)(((vs[i] - u.hi[j]) - u.lo[j]) * u.rstd[j]);
          const double kept = rounded ? round_as<T>(xhat) : xhat;
          const double gw = (double)(gs[i] * w[j * nest.per_element]);
          s1[j] += gw - (double)u.first[j];
          s4[j] += (double)gs[i];
          s2[j] += gw * xhat;
          s3[j] += (double)gs[i] * kept;
          by_weight += (double)gs[i] * kept;
          by_bias += (double)gs[i];
          if (!nest.mixed || !for_weight) continue;
          for_weight[p.at[AFFINE] + j] += (double)gs[i] * kept;
          for_bias[p.at[AFFINE] + j] += (double)gs[i];
        }
      }
      if (!for_weight || nest.mixed) return;
      for_weight[p.at[AFFINE] * 16] += by_weight;
      for_bias[p.at[AFFINE] * 16] += by_bias;
    });
  }

  NOINLINE int finish_backward(const Place &at, Unit &u, int64_t unit) const {
    merge_parts(u, backward_sums());
    double *s1 = u.part(0, 0), *s2 = u.part(0, 1), *s3 = u.part(0, 2);
    const C *w = weight + at.at[AFFINE];
    const double steps = (double)nest.applied.count;
    const bool own = nest.per_element && !nest.mixed;
    if (own && task.sums) {
      double *dw = unit_sums(unit), *db = dw + lane_pitch(nest);
      const double *by_xhat = rounded || task.mask ? s3 : s2;
      for (int64_t j = 0; j < u.lanes; j++) {
        dw[j] = by_xhat[j];
        db[j] = task.mask ? u.part(0, 3)[j] : s1[j] + (double)u.first[j] * steps;
      }
    }
    if (task.sums)
      for (int64_t j = 0; u.repair && j < u.lanes; j += nest.fold)
        if (u.unsafe[j]) add_exact(at, u, unit, j);
    if (task.running_mean) return u.repair ? 2 : 0;
    if (own && !task.mask) {
      // From grad to grad * weight; for the first element as the derivative rounds it.
      for (int64_t j = 0; j < u.lanes; j++) {
        const int64_t first = nest.fold > 1 ? j / nest.fold * nest.fold : j;
        const C gw = u.first[j] * w[j], group = u.first[first] * w[first];
        s1[j] = (double)w[j] * s1[j] + ((double)gw - (double)group) * steps;
        s2[j] = (double)w[j] * s2[j];
      }
      for (int64_t j = u.lanes - 1; j >= 0; j--) {
        const int64_t first = nest.fold > 1 ? j / nest.fold * nest.fold : j;
        u.first[j] = u.first[first] * w[first];
      }
    }
    fold(s1, u.lanes);
    fold(s2, u.lanes);
    constexpr int D = lanes<double>;
    const vd zero = {}, one = broadcast(1.0);
    for (int64_t j = 0; j < round_up(u.lanes, D); j += D) {
      const vd count = load(u.count + j), free = count - task.correction;
      const vd mean = load_as_double(u.first + j) + load(s1 + j) / (count > zero ? count : one);
      const vd slope = load(s2 + j) / (free > zero ? free : one);
      store_rounded(u.mean + j, center ? -mean : zero);
      store_rounded(u.slope + j, -slope);
    }
    V none = {};  // zero where all are finite, or not a number
    for (int64_t j = 0; j < u.lanes; j += W) {
      const int64_t left = u.lanes - j;
      const V mean = load_part(u.mean + j, left);
      const V slope = load_part(u.slope + j, left) * load_part(u.rstd + j, left);
      none += (mean - mean) + (slope - slope);
    }
    const bool look = u.repair || !(::sum(none) == 0);
    for (int64_t j = 0; look && j < u.lanes; j++) {
      u.redo[j] = u.unsafe[j] || !finite(u.mean[j]) || !finite(u.slope[j] * u.rstd[j]);
      u.repair |= u.redo[j];
    }
    return u.repair ? 2 : 0;
  }

  NOINLINE void add_exact(const Place &at, const Unit &u, int64_t unit, int64_t lane) const {
    const auto add = [&](const Place &p, int64_t i, double v) {
      if (nest.mixed) chunk_sums(unit)[p.at[AFFINE] + i] += v;
      else if (nest.per_element) unit_sums(unit)[i] += v;
      else chunk_sums(unit)[p.at[AFFINE] * 16] += v;
    };
    if (task.running_mean)
      weight_by<T>(task, Given(task, at.at[RUNNING] + lane / nest.fold * nest.running_step), at,
                   lane, nest.fold, add);
    else
      weight_by<T>(task, exact_group<T>(task, at, lane, nest.fold, u.count[lane]), at, lane,
                   nest.fold, add);
  }

  // Whether dx, which does not depend on the sums, is written along with them.
  bool at_once() const {
    return task.running_mean && task.sums && !task.mask && nest.per_element && !nest.mixed;
  }

  void apply_backward(const Place &at, const Unit &u, int64_t part) const {
    if (!job.dx || at_once()) return;
    if (nest.per_element) differentiate<true>(at, u, part);
    else differentiate<false>(at, u, part);
  }
  template <bool PerElement>
  void differentiate(const Place &at, const Unit &u, int64_t part) const {
    if (task.mask || task.running_mean) differentiate_steps<PerElement>(at, u, part);
    else if (nest.mixed) differentiate_chunks<PerElement, true>(at, u, part);
    else differentiate_chunks<PerElement, false>(at, u, part);
  }
  template <bool PerElement>
  NOINLINE void differentiate_steps(const Place &at, const Unit &u, int64_t part) const {
    each_step(at, part, [&](const Place &p) {
      T *dx = (T *)job.dx + p.at[DX];
      derivative_line<T, true, PerElement>(grad(p), x(p), dx, u.lanes, u.constants(), u.mean,
                                           u.slope, weight + p.at[AFFINE],
                                           task.running_mean != nullptr, 0, job.streamed);
      if (task.mask) zero_masked(dx, mask(p), nest.mask_step, u.lanes);
    });
  }
  // As apply_chunks.
  template <bool PerElement, bool Mixed>
  NOINLINE void differentiate_chunks(const Place &at, const Unit &u, int64_t part) const {
    each_chunk(at, part, some_steps(), [&](const Place &p, const Loop &along, int64_t steps)
                                           __attribute__((noinline)) {
      const bool streamed = job.streamed;
      const int64_t ahead = u.ahead, x_step = along.step[X], grad_step = along.step[GRAD];
      const int64_t dx_step = along.step[DX], affine_step = along.step[AFFINE];
      each_block<W, FEW>(u.lanes, [&](auto number, auto partial, int64_t lane, int64_t tail)
                                      __attribute__((always_inline)) {
        constexpr int B = decltype(number)::value;
        constexpr bool Partial = decltype(partial)::value, Own = PerElement && !Mixed;
        const Block<T, B, Partial> block = {tail};
        Derivative<T> derivative[B];
        V w[B], hi[B], shift[B], rstd[B], mean[B], slope[B];
        block.constants(u.hi + lane, hi);
        block.constants(u.shift + lane, shift);
        block.constants(u.rstd + lane, rstd);
        block.constants(u.mean + lane, mean);
        block.constants(u.slope + lane, slope);
        if (Own) block.constants(weight + p.at[AFFINE] + lane, w);
        for (int j = 0; j < B; j++) derivative[j].set({hi[j], shift[j], rstd[j]}, mean[j], slope[j]);
        const T *v = x(p) + lane, *g = grad(p) + lane;
        T *dx = (T *)job.dx + p.at[DX] + lane;
        const C *ws = weight + p.at[AFFINE];
        for (int64_t step = 0; step < steps; step++) {
          const bool past = streamed && can_stream(dx);
          if (Mixed) block.constants(ws + lane, w);
          const V all_w = Own || Mixed ? V{} : broadcast(*ws);
#pragma GCC unroll 8
          for (int j = 0; j < B; j += block.ONCE) {
            if (ahead) fetch(v + j * W + ahead), fetch(g + j * W + ahead);
            V gs[block.ONCE], vs[block.ONCE];
            block.take(g + j * W, gs);
            block.take(v + j * W, vs);
            for (int i = 0; i < block.ONCE; i++)
              gs[i] = derivative[j + i].template of<true>(
                  vs[i], gs[i] * (Own || Mixed ? w[j + i] : all_w));
            block.put(dx + j * W, gs, past);
          }
          v += x_step, g += grad_step, dx += dx_step, ws += affine_step;
        }
      });
    });
  }

  NOINLINE void repair_backward(const Place &at, const Unit &u) const {
    for (int64_t j = 0; job.dx && j < u.lanes; j += nest.fold) {
      if (!u.redo[j] && !u.unsafe[j]) continue;
      if (task.running_mean)
        derivative_by<T>(task, Given(task, at.at[RUNNING] + j / nest.fold * nest.running_step), at,
                         j, nest.fold);
      else
        derivative_by<T>(task, exact_group<T>(task, at, j, nest.fold, u.count[j]), at, j, nest.fold,
                         u.count[j]);
    }
  }
};

}  // namespace
