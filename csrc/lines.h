// The nest of lines: a group is a number of lines of contiguous elements, with outer loops around them.
// GroupNorm, InstanceNorm and BatchNorm of channels-first tensors, and whatever is too long or too
// branched for plain rows.
#pragma once

namespace {

// A unit under way: one group.
template <class C> struct LineUnit {
  C k;                      // the shift of the sums
  C hi, lo, shift, rstd;
  C first, mean, slope;     // backward
  double count;             // of valid elements
  int64_t ahead;            // from x of this unit to that of a later one, 0 if none is fetched
  int passes;
  bool unsafe;              // hi, lo, rstd are no use: the slow path
  bool repair;              // the output has to be done again
  double part[][2];
  Constants<C> constants() const { return {&hi, &shift, &rstd}; }
};

// Short groups one after the other would wait for each root and division. So many of them are settled
// as lanes of vectors, to the same bits.
constexpr int BATCH = 8;
constexpr int64_t GUESSED = 1024;  // bytes of a line: up to these the means of all are guessed first
template <class C> struct LineBatch {
  alignas(VB) C k[BATCH] = {}, hi[BATCH], lo[BATCH], shift[BATCH], rstd[BATCH];
  alignas(VB) C first[BATCH] = {}, mean[BATCH], slope[BATCH];
  Constants<C> constants(int i) const { return {hi + i, shift + i, rstd + i}; }
};

inline int64_t line_slot(const Nest &nest) {
  const int64_t parts = nest.measured.parts > nest.applied.parts ? nest.measured.parts
                                                                 : nest.applied.parts;
  return round_up((int64_t)sizeof(LineUnit<double>) + parts * 16, 64);
}

template <class C>
inline void save_statistics(const Task &task, int64_t index, C hi, C lo, C rstd, double var,
                            double count) {
  const Job &job = *task.job;
  if (job.stats) {
    C *stats = (C *)job.stats + index;
    stats[0] = hi;
    stats[task.nest->groups] = lo;
    stats[2 * task.nest->groups] = rstd;
  }
  if (job.var) job.var[index] = var;
  if (task.count) task.count[index] = count;
}

template <class T> struct OfLines {
  typedef Scalar<T> C;
  typedef Vector<T> V;
  typedef LineUnit<C> Unit;
  typedef LineBatch<C> Batch;
  typedef Units<BATCH> Some;
  static constexpr int TOGETHER = BATCH;
  static constexpr int W = lanes<T>, D = lanes<double>;
  static_assert(BATCH % D == 0 && D <= W, "whole vectors");

  const Task &task;
  const Job &job = *task.job;
  const Nest &nest = *task.nest;
  const bool center = job.center, rounded = can_round<T> && job.rounded;
  const int64_t per_element = nest.per_element;
  const C *const weight = (const C *)task.weight, *const bias = (const C *)task.bias;

  Place place(int64_t unit) const {
    Place p = {};
    seek(p, nest.kept, nest.kept_loops, unit);
    return p;
  }
  Unit &unit_in(void *slot, int64_t) const {
    Unit &u = *(Unit *)slot;
    u.ahead = 0;
    return u;
  }
  void places(int64_t unit, int count, Place *at) const {
    at[0] = place(unit);
    if (count == 1) return;
    const Loop &inner = nest.kept[nest.kept_loops - 1];
    int64_t index = unit % inner.size;
    Place p = at[0];
    for (int k = 1; k < count; k++) {
      if (++index < inner.size) advance(p, inner, 1);
      else p = place(unit + k), index = 0;
      at[k] = p;
    }
  }
  // Whether a unit is one part of lines without a mask.
  bool whole() const {
    return nest.measured.parts == 1 && nest.applied.parts == 1 && !task.mask;
  }
  // As many units as stay in a cache until they are applied: the second one for short lines, of which
  // each costs more than its elements, and for those that lie in pages of their own, else the first, in
  // which the output has a place, too.
  int together() const {
    if (!whole() || (job.singly && !across())) return 1;
    const int64_t size = sizeof(T), line = nest.applied.n * size;
    const int64_t fit = line <= (across() ? 1024 : 256) ? 1 << 18 : 14 << 10;
    const int64_t units = fit / (nest.group_size * size * (job.dx ? 2 : 1));
    return units > 1 ? (int)smaller(BATCH, units) : 1;
  }
  // Whether neighbours in memory are lines of different units.
  bool across() const {
    if (!nest.kept_loops || !nest.applied.loops) return false;
    const int64_t unit = nest.kept[nest.kept_loops - 1].step[X];
    const int64_t line = nest.applied.loop[nest.applied.loops - 1].step[X];
    return __builtin_llabs(unit) < __builtin_llabs(line);
  }
  // A line of a unit of a batch.
  struct Line {
    const T *x, *grad;
    T *out;
    const C *weight, *bias;
    double *sums;
    int unit;
  };
  static constexpr int LISTED = 16;  // lines of each unit of a whole batch
  // Lists the lines [begin, end) of each unit in the order of memory.
  template <bool Backward>
  NOINLINE void list(const Place *at, int count, int64_t begin, int64_t end, void *out,
                     Line *line) const {
    constexpr Array to = Backward ? DX : Y;
    const auto add = [&](const Place &p, const Place &from, int k) __attribute__((always_inline)) {
      const auto offset = [&](Array a) __attribute__((always_inline)) {
        return p.at[a] + (at[k].at[a] - from.at[a]);
      };
      const int64_t a = offset(AFFINE);
      line->x = (const T *)job.x + offset(X);
      line->out = (T *)out + offset(to);
      line->weight = weight + a;
      line->unit = k;
      if (Backward) {
        line->grad = (const T *)job.grad + offset(GRAD);
        line->sums = (double *)task.sums + 2 * offset(PIECE);
      } else {
        line->bias = bias + a;
      }
      line++;
    };
    const Lines &lines = nest.applied;
    if (lines.count == 1)
      for (int k = 0; k < count; k++) add(at[k], at[k], k);
    else if (across())
      each_line(lines, at[0], begin, end, [&](const Place &p, int64_t)
                                              __attribute__((always_inline)) {
        for (int k = 0; k < count; k++) add(p, at[0], k);
      });
    else
      for (int k = 0; k < count; k++)
        each_line(lines, at[k], begin, end, [&](const Place &p, int64_t)
                                                __attribute__((always_inline)) {
          add(p, at[k], k);
        });
  }
  // f(lines, how many, how many of each unit) for all lines of a batch. listed: what the last call of it
  // has listed may still stand there.
  template <bool Backward, class F>
  INLINE void each_list(const Place *at, int count, void *out, Line *line, bool listed,
                        const F &f) const {
    const int64_t all = nest.applied.count, most = LISTED * BATCH / count;
    for (int64_t begin = 0; begin < all; begin += most) {
      const int64_t end = smaller(all, begin + most);
      if (!listed || all > most) list<Backward>(at, count, begin, end, out, line);
      f(line, count * (end - begin), end - begin);
    }
  }

  bool fetches() const { return fetches_ahead<T>(job, nest, nest.group_size); }
  static Unit &unit_again(void *slot) { return *(Unit *)slot; }
  const T *x(const Place &p) const { return (const T *)job.x + p.at[X]; }
  const T *grad(const Place &p) const { return (const T *)job.grad + p.at[GRAD]; }
  const unsigned char *mask(const Place &p, int64_t i) const {
    return task.mask + p.at[MASK] + i * nest.mask_step;
  }
  NOINLINE double counted(const Place &at) const {
    if (!task.mask) return (double)nest.group_size;
    int64_t count = 0;
    each_line(nest.applied, at, 0, nest.applied.count, [&](const Place &p, int64_t) {
      count += count_valid(mask(p, 0), nest.mask_step, nest.applied.n);
    });
    return (double)count;
  }

  // ---- forward

  NOINLINE void start(const Place &at, Unit &u) const {
    u.passes = 0;
    u.repair = false;
    u.hi = u.lo = u.k = 0;
    u.count = counted(at);
    if (knows_statistics(task)) {
      take_known(at, u);
      return;
    }
    if (!center || u.count == 0) return;
    if (!task.mask) {
      u.k = guess_mean(x(at), nest.measured.n);
      return;
    }
    bool found = false;
    each_line(nest.applied, at, 0, nest.applied.count, [&](const Place &p, int64_t) {
      if (found) return;
      const int64_t n = nest.applied.n, i = first_valid(mask(p, 0), nest.mask_step, n);
      if (i == n) return;
      C near[64];
      const int64_t m = smaller(64, n - i);
      stage(x(p) + i, mask(p, i), nest.mask_step, m, (C)get(x(p) + i), near);
      u.k = guess_mean(near, m);
      found = true;
    });
  }

  // Running or saved statistics.
  NOINLINE void take_known(const Place &at, Unit &u) const {
    const Known<C> known(task, at);
    u.hi = known.hi();
    u.lo = known.lo();
    u.rstd = known.rstd();
    u.unsafe = !known.is_safe() && (task.running_mean || u.count > 0);
    // Then xhat is zero in backward's sums, and the slow path adds what is missing.
    if (u.unsafe) u.hi = u.lo = u.rstd = 0;
    u.shift = -u.lo * u.rstd;
    u.repair = u.unsafe;
  }

  NOINLINE void sum(const Place &at, Unit &u, int64_t part) const {
    Total<V> s = {}, q = {};
    each_piece(nest.measured, at, part, [&](const Place &p, int64_t, int64_t i, int64_t n)
                                            __attribute__((always_inline)) {
      if (!task.mask) return add_sums<T, true>(x(p) + i, n, u.k, s, q);
      for (const int64_t end = i + n; i < end; i += STAGED) {
        C staged[STAGED];
        n = smaller(STAGED, end - i);
        stage(x(p) + i, mask(p, i), nest.mask_step, n, u.k, staged);
        add_sums<C, true>(staged, n, u.k, s, q);
      }
    });
    u.part[part][0] = s.value();
    u.part[part][1] = q.value();
  }

  struct Sums { double s, q; };
  Sums merged(const Unit &u, int64_t parts) const {
    if (parts == 1) return {u.part[0][0], u.part[0][1]};
    Compensated s, q;
    for (int64_t p = 0; p < parts; p++) s.add(u.part[p][0]), q.add(u.part[p][1]);
    return {s.value(), q.value()};
  }

  NOINLINE int finish(const Place &at, Unit &u) const {
    const Sums a = merged(u, nest.measured.parts);
    const double count = u.count > 0 ? u.count : 1;
    if (center && u.passes++ == 0 && too_far<T>(a.s, a.q, count)) {
      u.k += (C)(a.s / count);
      return 1;
    }
    const double divisor = divisor_of(task, u.count);
    double var;
    u.hi = u.k;
    const bool redo = any(settle<double>(job, u.k, center ? a.s : 0, a.q, {count, divisor}, &u.lo,
                                         &u.rstd, &var));
    u.shift = -u.lo * u.rstd;
    u.unsafe = u.repair = redo && u.count > 0;
    if (u.unsafe) {
      const Exact<T> exact = exact_group<T>(task, at, 0, nest.applied.n, u.count);
      exact.save(&u.hi, &u.lo, &u.rstd);
      var = exact.var;
    }
    save_statistics(task, at.at[STATS], u.hi, u.lo, u.rstd, var, u.count);
    return u.repair ? 2 : 0;
  }

  // The means of units that come next.
  struct Guesses {
    bool known;
    alignas(VB) C k[BATCH];
  };
  // All steps for some units. False: something needs the slow path, and they are to be taken one by one.
  bool forward_together(const Some &units, const Some &next, int64_t ahead,
                        Guesses &guesses) const {
    if (knows_statistics(task)) return false;
    const Place *const at = units.at;
    const int count = units.count;
    Batch u;
    if (count == 1) {
      if (!whole() || !(center ? measure_one<true>(*at, u) : measure_one<false>(*at, u))) return false;
    } else if (!(center ? measure<true>(units, next, guesses, u)
                        : measure<false>(units, next, guesses, u))) {
      return false;
    }
    if (!job.y) return true;
    if (job.activation) {
      for (int k = 0; k < count; k++)
        per_element ? activate<true>(at[k], u.constants(k), ahead, 0)
                    : activate<false>(at[k], u.constants(k), ahead, 0);
    } else if (per_element) {
      apply_batch<true>(at, count, u, ahead);
    } else {
      apply_batch<false>(at, count, u, ahead);
    }
    return true;
  }
  template <bool Center>
  NOINLINE bool measure(const Some &units, const Some &next, Guesses &guesses, Batch &u) const {
    const Place *const at = units.at;
    const int count = units.count;
    const Lines &lines = nest.measured;
    Total<V> s[BATCH], q[BATCH];
    // Longer lines are read once from end to end: each guess right before its sums.
    const bool guess = Center && lines.n * (int64_t)sizeof(T) > GUESSED;
    if (Center && !guess) {
      if (!guesses.known) guess_means(at, count, guesses.k);
      memcpy(u.k, guesses.k, sizeof u.k);
      guesses.known = false;
    }
    each_line(lines, at[0], 0, lines.count, [&](const Place &p, int64_t i) {
      add_lines<Center>(at, count, p.at[X] - at[0].at[X], i == 0, guess, u.k, s, q);
    });
    for (int k = count; k < BATCH; k++) s[k] = q[k] = Total<V>{};
    alignas(VB) double sums[BATCH], squares[BATCH], var[BATCH];
    for (int j = 0; j < BATCH; j += D) {
      store(sums + j, values(s + j));
      store(squares + j, values(q + j));
    }
    for (int k = count; k < BATCH; k++) squares[k] = 1;  // nothing is wrong with what is not there
    const double size = (double)nest.group_size;
    vl far = {};
    for (int j = 0; j < BATCH; j += D) far |= is_far(load(sums + j), load(squares + j));
    if (Center && __builtin_expect(any(far), 0)) {
      for (int k = 0; k < count; k++) {
        if (!is_far(sums[k], squares[k])) continue;
        u.k[k] += (C)(sums[k] / size);
        Total<V> again[2] = {};
        each_line(lines, at[k], 0, lines.count, [&](const Place &p, int64_t) {
          add_sums<T, Center>(x(p), lines.n, u.k[k], again[0], again[1]);
        });
        sums[k] = again[0].value();
        squares[k] = again[1].value();
      }
    }
    const auto sizes = sizes_of<false>(task, broadcast(size));
    vl redo = {};
    for (int j = 0; j < BATCH; j += D) {
      redo |= settle_some(task, load(sums + j), load(squares + j), sizes, u.k + j,
                          u.hi + j, u.lo + j, u.rstd + j, var + j);
    }
    if (__builtin_expect(any(redo), 0)) return false;
    // Meanwhile these wait for a root and divisions.
    if (Center && !guess && (guesses.known = next.count > 1)) guess_means(next.at, next.count, guesses.k);
    for (int k = 0; k < BATCH; k++) u.shift[k] = -u.lo[k] * u.rstd[k];
    if (!job.stats && !job.var && !task.count) return true;
    for (int k = 0; k < count; k++)
      save_statistics(task, at[k].at[STATS], u.hi[k], u.lo[k], u.rstd[k], var[k], size);
    return true;
  }
  // As measure, of one unit: its sums stay in registers.
  template <bool Center> NOINLINE bool measure_one(const Place &at, Batch &u) const {
    const Lines &lines = nest.measured;
    const C k = Center ? guess_mean(x(at), lines.n) : 0;
    Total<V> s = {}, q = {};
    const auto add = [&](const Place &p, int64_t) __attribute__((always_inline)) {
      add_sums<T, Center>(x(p), lines.n, k, s, q);
    };
    if (lines.count == 1) add(at, 0);
    else each_line(lines, at, 0, lines.count, add);
    const double size = (double)nest.group_size, sum = Center ? s.value() : 0, square = q.value();
    if (Center && __builtin_expect(is_far(sum, square), 0)) return false;
    double var;
    u.hi[0] = k;
    if (__builtin_expect(any(settle<double>(job, k, sum, square, {size, divisor_of(task, size)},
                                            u.lo, u.rstd, &var)), 0))
      return false;
    u.shift[0] = -u.lo[0] * u.rstd[0];
    save_statistics(task, at.at[STATS], k, u.lo[0], u.rstd[0], var, size);
    return true;
  }
  template <class S> auto is_far(S sum, S squares) const {
    return too_far<T>(sum, squares, (double)nest.group_size);
  }
  // One line of each unit, so far from the first one.
  template <bool Center>
  NOINLINE void add_lines(const Place *at, int count, int64_t offset, bool first, bool guess, C *shift,
                          Total<V> *s, Total<V> *q) const {
    const int64_t n = nest.measured.n;
    for (int k = 0; k < count; k++) {
      const T *line = x(at[k]) + offset;
      if (guess && first) shift[k] = guess_mean(line, n);
      Total<V> sum = {}, square = {};
      if (!first) sum = s[k], square = q[k];
      add_sums<T, Center>(line, n, shift[k], sum, square);
      s[k] = sum;
      q[k] = square;
    }
  }
  // guess_mean of each unit.
  NOINLINE void guess_means(const Place *at, int count, C *k) const {
    const int64_t m = smaller(nest.measured.n, NEAR);
    V near[BATCH];
    C x0;
    for (int i = 0; i < count; i++) near[i] = sum_near(x(at[i]), m, &x0);
    for (int i = count; i < BATCH; i++) near[i] = V{};
    for (int j = 0; j < BATCH; j += D) {
      const vd s = block_sums(near + j);
      const vd first = each_lane([&](int lane) __attribute__((always_inline)) {
        return (double)first_of(x(at[smaller(j + lane, count - 1)]), m);
      });
      store_rounded(k + j, first + rounded_to<C>(m == NEAR ? s * (1.0 / NEAR) : s / (double)m));
    }
  }
  template <bool PerElement>
  void apply_batch(const Place *at, int count, const Batch &u, int64_t ahead) const {
    if (count == 1) return apply_unit<PerElement>(*at, u.constants(0), ahead);
    Line listed[LISTED * BATCH];
    each_list<false>(at, count, job.y, listed, false, [&](const Line *line, int64_t lines, int64_t) {
      apply_lines<PerElement>(line, lines, u, ahead);
    });
  }
  template <bool PerElement>
  NOINLINE void apply_unit(const Place &at, const Constants<C> &constants, int64_t ahead) const {
    const int64_t n = nest.applied.n;
    const bool streamed = job.streamed, rounds = rounded;
    // In registers: what is read while much is being written may be taken for that.
    const C hi = *constants.hi, shift = *constants.shift, rstd = *constants.rstd;
    each_line(nest.applied, at, 0, nest.applied.count, [&](const Place &p, int64_t)
                                                           __attribute__((always_inline)) {
      const int64_t a = p.at[AFFINE];
      apply_line<T, false, PerElement>(x(p), (T *)job.y + p.at[Y], n, {&hi, &shift, &rstd}, false,
                                       rounds, weight + a, bias + a, ahead, streamed);
    });
  }
  // Not inline, like what sums and differentiates them: there would not be registers enough.
  template <bool PerElement>
  NOINLINE void apply_lines(const Line *line, int64_t lines, const Batch &u, int64_t ahead) const {
    const int64_t n = nest.applied.n;
    const bool streamed = job.streamed, rounds = rounded;
    for (const Line *const end = line + lines; line < end; line++)
      apply_line<T, false, PerElement>(line->x, line->out, n, u.constants(line->unit), false, rounds,
                                       line->weight, line->bias, ahead, streamed);
  }

  void apply(const Place &at, const Unit &u, int64_t part) const {
    if (!job.y || u.repair) return;
    if (job.activation)
      return per_element ? activate<true>(at, u.constants(), u.ahead, part)
                         : activate<false>(at, u.constants(), u.ahead, part);
    if (per_element) apply_to<true>(at, u, part);
    else apply_to<false>(at, u, part);
  }
  template <bool PerElement>
  NOINLINE void apply_to(const Place &at, const Unit &u, int64_t part) const {
    each_piece(nest.applied, at, part, [&](const Place &p, int64_t, int64_t i, int64_t n)
                                           __attribute__((always_inline)) {
      normalize<PerElement>(p, u.constants(), i, n, u.ahead);
      if (task.mask) zero_masked((T *)job.y + p.at[Y] + i, mask(p, i), nest.mask_step, n);
    });
  }
  template <bool PerElement>
  INLINE void normalize(const Place &p, const Constants<C> &constants, int64_t first, int64_t n,
                        int64_t ahead) const {
    const int64_t a = p.at[AFFINE] + (PerElement ? first : 0);
    apply_line<T, false, PerElement>(x(p) + first, (T *)job.y + p.at[Y] + first, n, constants,
                                     task.running_mean != nullptr, rounded, weight + a, bias + a,
                                     ahead, job.streamed);
  }

  template <bool PerElement>
  NOINLINE void activate(const Place &at, const Constants<C> &constants, int64_t ahead,
                         int64_t part) const {
    each_piece(nest.applied, at, part, [&](const Place &p, int64_t, int64_t i, int64_t n) {
      normalize_and_activate<PerElement>(p, constants, i, n, ahead);
      if (task.mask) zero_masked((T *)job.y + p.at[Y] + i, mask(p, i), nest.mask_step, n);
    });
  }
  template <bool PerElement>
  NOINLINE void normalize_and_activate(const Place &p, const Constants<C> &constants, int64_t first,
                                       int64_t n, int64_t ahead) const {
    const T *v = x(p) + first, *g = job.grad ? grad(p) + first : nullptr;
    const int64_t a = p.at[AFFINE] + (PerElement ? first : 0);
    each_strip(job, g, (T *)job.y + p.at[Y] + first, n, [&](int64_t i, int64_t k, C *z) {
      const int64_t e = a + (PerElement ? i : 0);
      apply_line<T, false, PerElement>(v + i, z, k, constants, task.running_mean != nullptr,
                                       rounded, weight + e, bias + e, ahead, false);
    });
  }

  // Lines of so many units that follow each other.
  NOINLINE void apply_row(const Place &first, int64_t count) const {
    const int64_t n = nest.applied.n;
    const int64_t *step = nest.kept[0].step;
    const int64_t x_step = step[X], y_step = step[Y], affine_step = step[AFFINE];
    const bool rounds = rounded, streamed = job.streamed;
    const T *v = x(first);
    T *y = (T *)job.y + first.at[Y];
    const C *w = weight + first.at[AFFINE], *b = bias + first.at[AFFINE];
    Known<C> known(task, first);
    for (int64_t i = 0; i < count; i++) {
      const C hi = known.hi(), rstd = known.rstd(), shift = -known.lo() * rstd;
      apply_line<T, false, false>(v, y, n, {&hi, &shift, &rstd}, true, rounds, w, b, 0, streamed);
      known.step();
      v += x_step, y += y_step, w += affine_step, b += affine_step;
    }
  }
  void activate_row(const Place &first, int64_t count) const {
    Known<C> known(task, first);
    Place p = first;
    for (int64_t i = 0; i < count; i++) {
      const C hi = known.hi(), rstd = known.rstd(), shift = -known.lo() * rstd;
      normalize_and_activate<false>(p, {&hi, &shift, &rstd}, 0, nest.applied.n, 0);
      known.step();
      advance(p, nest.kept[0], 1);
    }
  }
  // By running statistics no group is needed as a whole. Short lines are taken in the order of memory:
  // 16 lines of 7 times 7 that belong to one channel lie in 16 pages, and took half as long again.
  NOINLINE void forward_in_order(int64_t unit, int64_t end) const {
    const int64_t n = nest.applied.n;
    each_line(nest.applied, place(unit), 0, nest.applied.count, [&](const Place &first, int64_t) {
      if (job.activation) activate_row(first, end - unit);
      else apply_row(first, end - unit);
    });
    Place at = place(unit);
    for (int64_t i = unit; i < end; i++, advance(at, nest.kept[0], 1))
      if (!Known<C>(task, at).is_safe())
        forward_by<T>(task, Given(task, at.at[RUNNING]), at, 0, n);
  }

  NOINLINE void repair(const Place &at, const Unit &u) const {
    if (!job.y) return;
    if (task.mask)
      each_line(nest.applied, at, 0, nest.applied.count, [&](const Place &p, int64_t) {
        zero_masked((T *)job.y + p.at[Y], mask(p, 0), nest.mask_step, nest.applied.n);
      });
    if (task.running_mean)
      forward_by<T>(task, Given(task, at.at[RUNNING]), at, 0, nest.applied.n);
    else
      forward_by<T>(task, exact_group<T>(task, at, 0, nest.applied.n, u.count), at, 0,
                    nest.applied.n);
  }

  // ---- backward

  NOINLINE void start_backward(const Place &at, Unit &u) const {
    u.count = counted(at);
    take_known(at, u);
    u.first = u.mean = u.slope = 0;
    if (!center || task.running_mean) return;
    if (!task.mask) {
      u.first = (C)get(grad(at)) * weight[at.at[AFFINE]];
      return;
    }
    bool found = false;
    each_line(nest.applied, at, 0, nest.applied.count, [&](const Place &p, int64_t) {
      const int64_t n = nest.applied.n, i = found ? n : first_valid(mask(p, 0), nest.mask_step, n);
      if (i == n) return;
      u.first = (C)get(grad(p) + i) * weight[p.at[AFFINE] + i * per_element];
      found = true;
    });
  }

  // What a piece of a line adds.
  struct PieceSums {
    double grad, by_xhat, by_rounded;  // of grad, grad * xhat, grad * the rounded xhat
    double s1, s2;                     // of grad * weight - u.first, grad * weight * xhat
  };

  // Sums of grad - first, of grad * xhat, and where that is rounded of grad * the rounded one.
  struct FlatSums { V of[can_round<T> ? 3 : 2]; };
  // Those of a block of a line with one weight. first: the line's first gradient, so that the sum of
  // equal ones is exact. Writes: dx too, where running statistics normalize.
  template <bool Writes>
  INLINE FlatSums flat_block(const T *g, const T *x, int64_t n, const Constants<C> &constants,
                             C first, C weight, T *dx) const {
    const bool rounds = can_round<T> && rounded;
    const bool streamed = Writes && job.streamed && can_stream(dx);
    const Standardize<T, false> standardized(constants);
    V s1[2] = {}, s2[2] = {}, s3[2] = {};
    const auto add = [&](int64_t i, int64_t tail, int j) __attribute__((always_inline)) {
      const V grad = tail ? load(g + i, tail) : load(g + i);
      V v = standardized(tail ? load(x + i, tail) : load(x + i), i, tail);
      if (tail) v = keep(v, tail);
      s1[j] += tail ? keep(grad - first, tail) : grad - first;
      s2[j] = fma(v, grad, s2[j]);
      if (rounds) s3[j] = fma(round_as<T>(v), grad, s3[j]);
      if (!Writes) return;
      const V derivative = grad * weight * standardized.rstd(i, tail);
      if (tail) store(dx + i, derivative, tail);
      else write(dx + i, derivative, streamed);
    };
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) add(i, 0, 0), add(i + W, 0, 1);
    if (i + W <= n) add(i, 0, 0), i += W;
    if (i < n) add(i, n - i, 1);
    FlatSums sums;
    sums.of[0] = s1[0] + s1[1];
    sums.of[1] = s2[0] + s2[1];
    if (can_round<T>) sums.of[can_round<T> ? 2 : 0] = s3[0] + s3[1];
    return sums;
  }
  template <bool Writes>
  INLINE PieceSums flat_sums(const T *g, const T *x, int64_t n, const Unit &u, C weight,
                             T *dx) const {
    const C first = (C)get(g);
    Total<V> t[can_round<T> ? 3 : 2] = {};
    for (int64_t i = 0; i < n; i += FLAT<T>) {
      const int64_t m = smaller(FLAT<T>, n - i);
      const FlatSums block = flat_block<Writes>(g + i, x + i, m, u.constants(), first, weight,
                                                Writes ? dx + i : nullptr);
      for (int j = 0; j < (can_round<T> && rounded ? 3 : 2); j++)
        if (n <= FLAT<T>) t[j].add_only(block.of[j]);
        else t[j].add(block.of[j]);
    }
    const double of_grad = t[0].value();
    PieceSums sums = {};
    sums.grad = (double)first * (double)n + of_grad;
    sums.by_xhat = t[1].value();
    sums.by_rounded = rounded ? t[can_round<T> ? 2 : 1].value() : sums.by_xhat;
    // Of the first element as the derivative rounds it, so that equal ones cancel.
    sums.s1 = (double)weight * of_grad +
              ((double)(C)(first * weight) - (double)u.first) * (double)n;
    sums.s2 = (double)weight * sums.by_xhat;
    return sums;
  }

  // dw and db are at the weight's first element.
  INLINE PieceSums element_sums(const T *g, const T *x, int64_t n, const Unit &u, const C *w,
                                double *dw, double *db) const {
    Total<V> t1 = {}, t2 = {};
    const Standardize<T, false> standardized(u.constants());
    const Parameter<true, C> weights(w);
    int64_t i = 0;
    do {
      const int64_t end = smaller(n, i + BLOCK * W);
      V s1 = {}, s2 = {};
      const auto add = [&](int64_t i, int64_t tail) __attribute__((always_inline)) {
        const V grad = tail ? load(g + i, tail) : load(g + i);
        V v = standardized(tail ? load(x + i, tail) : load(x + i), i, tail);
        if (tail) v = keep(v, tail);
        const V gw = grad * weights(i, tail);
        s1 += tail ? keep(gw - u.first, tail) : gw - u.first;
        s2 = fma(v, gw, s2);
        if (!dw) return;
        if (can_round<T> && rounded) v = round_as<T>(v);
        add_to(dw + i, grad * v);  // the sums end in a whole vector
        add_to(db + i, grad);
      };
      for (; i + W <= end; i += W) add(i, 0);
      if (i < end) add(i, end - i), i = end;
      t1.add(s1);
      t2.add(s2);
    } while (i < n);
    PieceSums sums = {};
    sums.s1 = t1.value();
    sums.s2 = t2.value();
    return sums;
  }

  NOINLINE PieceSums masked_sums(const T *g, const T *x, const unsigned char *m, int64_t n, const Unit &u,
                        const C *w, double *dw, double *db) const {
    SumFor<C> of_grad, by_xhat, by_rounded, s1, s2;
    for (int64_t begin = 0; begin < n; begin += STAGED) {
      const int64_t count = smaller(STAGED, n - begin);
      C gs[STAGED], vs[STAGED];
      const unsigned char *valid = m + begin * nest.mask_step;
      stage(g + begin, valid, nest.mask_step, count, (C)0, gs);
      stage(x + begin, valid, nest.mask_step, count, u.hi, vs);
      for (int64_t i = 0; i < count; i++) {
        if (!valid[i * nest.mask_step]) continue;
        const int64_t a = per_element ? begin + i : 0;
        const double grad = (double)gs[i];
        const C xhat = ((vs[i] - u.hi) - u.lo) * u.rstd;
        const double kept = rounded ? round_as<T>((double)xhat) : (double)xhat;
        const double gw = (double)(gs[i] * w[a]);
        of_grad.add(grad);
        by_xhat.add(grad * (double)xhat);
        by_rounded.add(grad * kept);
        s1.add(gw - (double)u.first);
        s2.add(gw * (double)xhat);
        if (dw) dw[a] += grad * kept, db[a] += grad;
      }
    }
    return {of_grad.value(), by_xhat.value(), by_rounded.value(), s1.value(), s2.value()};
  }

  double *chunk_sums(int64_t unit) const {
    return (double *)task.sums + unit / task.chunk * 2 * task.pitch;
  }
  double *piece_sums(const Place &p, int64_t i) const {
    return (double *)task.sums + 2 * (p.at[PIECE] + i / nest.applied.piece);
  }

  void sum_backward(const Place &at, Unit &u, int64_t part, int64_t unit) const {
    if (per_element) sum_gradients<true, false>(at, u, part, unit);
    else if (at_once() && job.dx) sum_gradients<false, true>(at, u, part, unit);
    else sum_gradients<false, false>(at, u, part, unit);
  }
  template <bool PerElement, bool AtOnce>
  NOINLINE void sum_gradients(const Place &at, Unit &u, int64_t part, int64_t unit) const {
    Compensated s1, s2;
    each_piece(nest.applied, at, part, [&](const Place &p, int64_t, int64_t i, int64_t n)
                                           __attribute__((always_inline)) {
      const C *w = weight + p.at[AFFINE] + (PerElement ? i : 0);
      const T *g = grad(p) + i, *v = x(p) + i;
      double *dw = nullptr, *db = nullptr;
      if (PerElement && task.sums) {
        dw = chunk_sums(unit) + p.at[AFFINE] + i;
        db = dw + task.pitch;
      }
      PieceSums a;
      if (task.mask) {
        a = masked_sums(g, v, mask(p, i), n, u, w, dw, db);
      } else if (PerElement) {
        a = element_sums(g, v, n, u, w, dw, db);
      } else {
        a = AtOnce ? flat_sums<true>(g, v, n, u, *w, (T *)job.dx + p.at[DX] + i)
                   : flat_sums<false>(g, v, n, u, *w, nullptr);
      }
      s1.add(a.s1);
      s2.add(a.s2);
      if (!PerElement && task.sums) {
        double *sums = piece_sums(p, i);
        sums[0] = a.by_rounded;
        sums[1] = a.grad;
      }
    });
    u.part[part][0] = s1.value();
    u.part[part][1] = s2.value();
  }

  // As forward_together.
  bool backward_together(const Place *at, int count, int64_t ahead) const {
    if (nest.applied.count * count < D || per_element || nest.applied.n > FLAT<T> || !whole())
      return false;
    Batch u;
    for (int k = 0; k < count; k++) {
      const Known<C> known(task, at[k]);
      if (__builtin_expect(!known.is_safe(), 0)) return false;
      u.hi[k] = known.hi();
      u.rstd[k] = known.rstd();
      u.shift[k] = -known.lo() * u.rstd[k];
      if (center && !task.running_mean) u.first[k] = (C)get(grad(at[k])) * weight[at[k].at[AFFINE]];
    }
    Line line[LISTED * BATCH];
    if (at_once() && job.dx) {
      sum_batch<true>(at, count, u, line);
      return true;
    }
    const bool sums = task.sums || !task.running_mean;
    if (sums) sum_batch<false>(at, count, u, line);
    for (int k = 0; !task.running_mean && k < count; k++)
      if (!finite(u.mean[k]) || !finite(u.slope[k] * u.rstd[k])) return false;
    if (!job.dx) return true;
    each_list<true>(at, count, job.dx, line, sums, [&](const Line *line, int64_t lines, int64_t) {
      differentiate_lines(line, lines, u, ahead);
    });
    return true;
  }
  template <bool Writes>
  NOINLINE void sum_lines(const Line *line, int64_t lines, const Batch &u, FlatSums *sums) const {
    const int64_t n = nest.applied.n;
    for (const Line *const end = line + lines; line < end; line++, sums++) {
      *sums = flat_block<Writes>(line->grad, line->x, n, u.constants(line->unit),
                                 first_of(line->grad, n),
                                 Writes ? *line->weight : 0, line->out);
    }
  }
  // What so many lines add to the sums of their units, as many at once as a vector of doubles has lanes:
  // one after the other, each would wait for its own. As flat_sums.
  template <bool Writes>
  INLINE void add_batch(const Line *line, int64_t lines, const Batch &u, double *s1, double *s2) const {
    const vd n = broadcast((double)nest.applied.n);
    FlatSums sums[D];
    sum_lines<Writes>(line, lines, u, sums);
    for (int64_t i = lines; i < D; i++) sums[i] = sums[0];
    const auto each = [&](const auto &value) __attribute__((always_inline)) {
      return each_lane([&](int i) __attribute__((always_inline)) {
        return (double)value(line[smaller(i, lines - 1)]);
      });
    };
    const vd first = each([&](const Line &l) { return first_of(l.grad, nest.applied.n); });
    const vd weights = each([&](const Line &l) { return *l.weight; });
    const vd of_unit = each([&](const Line &l) { return u.first[l.unit]; });
    const auto values_of = [&](int which) __attribute__((always_inline)) {
      V v[D];
      for (int i = 0; i < D; i++) v[i] = sums[i].of[which];
      return block_sums(v);
    };
    const vd of_grad = values_of(0), of_xhat = values_of(1);
    const vd rest = rounded_to<C>(first * weights) - of_unit;
    store(s1, weights * of_grad + rest * n);
    store(s2, weights * of_xhat);
    if (!task.sums) return;
    alignas(VB) double by_xhat[D], by_grad[D];
    store(by_grad, first * n + of_grad);
    store(by_xhat, can_round<T> && rounded ? values_of(can_round<T> ? 2 : 1) : of_xhat);
    for (int64_t i = 0; i < lines; i++) {
      line[i].sums[0] = by_xhat[i];
      line[i].sums[1] = by_grad[i];
    }
  }
  template <bool Writes>
  NOINLINE void sum_batch(const Place *at, int count, Batch &u, Line *listed) const {
    Compensated s1[BATCH], s2[BATCH];
    each_list<true>(at, count, job.dx, listed, false, [&](const Line *line, int64_t lines,
                                                          int64_t of_each) {
      alignas(VB) double of_line[2][LISTED * BATCH];
      for (int64_t i = 0; i < lines; i += D)
        add_batch<Writes>(line + i, smaller(D, lines - i), u, of_line[0] + i, of_line[1] + i);
      if (task.running_mean) return;
      // From a line to the next one of its unit, and to the same one of the next unit.
      const int64_t down = across() ? count : 1, beside = across() ? 1 : of_each;
      for (int k = 0; k < count; k++) {
        Compensated sum1 = s1[k], sum2 = s2[k];
        for (int64_t l = 0, i = k * beside; l < of_each; l++, i += down) {
          sum1.add(of_line[0][i]);
          sum2.add(of_line[1][i]);
        }
        s1[k] = sum1;
        s2[k] = sum2;
      }
    });
    if (task.running_mean) return;
    const double size = (double)nest.group_size, divisor = divisor_of(task, size);
    for (int k = 0; k < count; k++) {
      u.mean[k] = center ? -(C)((double)u.first[k] + s1[k].value() / size) : C(0);
      u.slope[k] = -(C)(s2[k].value() / divisor);
    }
  }
  NOINLINE void differentiate_lines(const Line *line, int64_t lines, const Batch &u,
                                    int64_t ahead) const {
    const int64_t n = nest.applied.n;
    const bool streamed = job.streamed, given = task.running_mean;
    for (const Line *const end = line + lines; line < end; line++)
      derivative_line<T, false, false>(line->grad, line->x, line->out, n, u.constants(line->unit),
                                       u.mean + line->unit, u.slope + line->unit, line->weight,
                                       given, ahead, streamed);
  }

  NOINLINE int finish_backward(const Place &at, Unit &u, int64_t unit) const {
    if (u.unsafe && task.sums) add_exact(at, u, unit);
    if (task.running_mean) return u.repair ? 2 : 0;
    const Sums a = merged(u, nest.applied.parts);
    const double count = u.count > 0 ? u.count : 1;
    u.mean = center ? -(C)((double)u.first + a.s / count) : C(0);
    u.slope = -(C)(a.q / divisor_of(task, u.count));
    u.repair |= !finite(u.mean) || !finite(u.slope * u.rstd);
    return u.repair ? 2 : 0;
  }

  NOINLINE void add_exact(const Place &at, const Unit &u, int64_t unit) const {
    const auto add = [&](const Place &p, int64_t i, double v) {
      if (per_element) chunk_sums(unit)[p.at[AFFINE] + i] += v;
      else piece_sums(p, i)[0] += v;
    };
    if (task.running_mean)
      weight_by<T>(task, Given(task, at.at[RUNNING]), at, 0, nest.applied.n, add);
    else
      weight_by<T>(task, exact_group<T>(task, at, 0, nest.applied.n, u.count), at, 0,
                   nest.applied.n, add);
  }

  // Whether dx, which does not depend on the sums, is written along with them.
  bool at_once() const {
    return task.running_mean && task.sums && !task.mask && !per_element;
  }

  void apply_backward(const Place &at, const Unit &u, int64_t part) const {
    if (!job.dx || at_once()) return;
    if (per_element) differentiate<true>(at, u, part);
    else differentiate<false>(at, u, part);
  }
  template <bool PerElement>
  NOINLINE void differentiate(const Place &at, const Unit &u, int64_t part) const {
    each_piece(nest.applied, at, part, [&](const Place &p, int64_t, int64_t i, int64_t n)
                                           __attribute__((always_inline)) {
      T *dx = (T *)job.dx + p.at[DX] + i;
      derivative_line<T, false, PerElement>(grad(p) + i, x(p) + i, dx, n, u.constants(), &u.mean,
                                            &u.slope,
                                            weight + p.at[AFFINE] + (PerElement ? i : 0),
                                            task.running_mean != nullptr, u.ahead, job.streamed);
      if (task.mask) zero_masked(dx, mask(p, i), nest.mask_step, n);
    });
  }

  NOINLINE void repair_backward(const Place &at, const Unit &u) const {
    if (!job.dx) return;
    const int64_t n = nest.applied.n;
    if (task.running_mean)
      derivative_by<T>(task, Given(task, at.at[RUNNING]), at, 0, n);
    else
      derivative_by<T>(task, exact_group<T>(task, at, 0, n, u.count), at, 0, n, u.count);
  }
};

}  // namespace
