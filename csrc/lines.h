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
  int64_t ahead;            // from x of this unit to that of the next one, 0 if none is fetched
  int passes;
  bool unsafe;              // hi, lo, rstd are no use: the slow path
  bool repair;              // the output has to be done again
  double part[][2];
  Constants<C> constants() const { return {&hi, &shift, &rstd}; }
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
  // Short groups one after the other would wait for each root and division.
  static constexpr int TOGETHER = 4;
  static constexpr int W = lanes<T>;

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
  // As many units as stay in the first cache until they are applied.
  int together() const {
    const bool fit = TOGETHER * nest.group_size * (int64_t)sizeof(T) <= 1 << 15;
    return fit && !job.singly ? TOGETHER : 1;
  }
  bool fetches() const { return fetches_ahead<T>(job, nest, nest.group_size); }
  int64_t slot() const { return line_slot(nest); }
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
    Total<V> s, q;
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

  Sums merged(const Unit &u, int64_t parts) const {
    if (parts == 1) return {u.part[0][0], u.part[0][1]};
    Compensated s, q;
    for (int64_t p = 0; p < parts; p++) s.add(u.part[p][0]), q.add(u.part[p][1]);
    return {s.value(), q.value()};
  }

  NOINLINE int finish(const Place &at, Unit &u) const {
    const Sums a = merged(u, nest.measured.parts);
    const double count = u.count > 0 ? u.count : 1;
    constexpr double factor = same<C, double> ? 5 : 2;  // as in moments
    if (center && u.passes++ == 0 && !(factor * a.s * a.s <= count * a.q)) {
      u.k += (C)(a.s / count);
      return 1;
    }
    const double divisor = divisor_of(task, u.count);
    const Settled<C> found = center ? settle<T, true>(job.eps, u.k, a, count, divisor)
                                    : settle<T, false>(job.eps, 0, {0, a.q}, count, divisor);
    u.hi = u.k;
    u.lo = found.lo;
    u.rstd = found.rstd;
    u.shift = -u.lo * u.rstd;
    double var = found.var;
    u.unsafe = u.repair = found.redo && u.count > 0;
    if (u.unsafe) {
      const Exact<T> exact = exact_group<T>(task, at, 0, nest.applied.n, u.count);
      exact.save(&u.hi, &u.lo, &u.rstd);
      var = exact.var;
    }
    save_statistics(task, at.at[STATS], u.hi, u.lo, u.rstd, var, u.count);
    return u.repair ? 2 : 0;
  }

  // START, SUM and FINISH of some groups of one line each, to the same bits: one by one, groups of 14
  // times 14 take a quarter longer. False: nothing is done, and they are to be taken step by step.
  bool measure_together(const Place *at, Unit *const *u) const {
    if (task.mask || knows_statistics(task) || nest.measured.count > 1 || nest.measured.split > 1)
      return false;
    return center ? measure_lines<true>(at, u) : measure_lines<false>(at, u);
  }
  template <bool Center> NOINLINE bool measure_lines(const Place *at, Unit *const *u) const {
    const T *line[TOGETHER];
    for (int k = 0; k < TOGETHER; k++) line[k] = x(at[k]);
    const double count = (double)nest.group_size;
    const Moments<T, TOGETHER> m = moments<T, Center, TOGETHER>(line, nest.measured.n, job.eps,
                                                                divisor_of(task, count));
    if (__builtin_expect(m.redo, 0)) return false;
    for (int k = 0; k < TOGETHER; k++) {
      u[k]->hi = m.hi[k];
      u[k]->shift = -m.lo[k] * m.rstd[k];
      u[k]->rstd = m.rstd[k];
      u[k]->repair = false;
      save_statistics(task, at[k].at[STATS], m.hi[k], m.lo[k], m.rstd[k], m.var[k], count);
    }
    return true;
  }

  void apply(const Place &at, const Unit &u, int64_t part) const {
    if (!job.y || u.repair) return;
    if (job.activation)
      return per_element ? activate<true>(at, u, part) : activate<false>(at, u, part);
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
  NOINLINE void activate(const Place &at, const Unit &u, int64_t part) const {
    each_piece(nest.applied, at, part, [&](const Place &p, int64_t, int64_t i, int64_t n) {
      normalize_and_activate<PerElement>(p, u.constants(), i, n, u.ahead);
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

  // By running statistics no group is needed as a whole. Short lines are taken in the order of memory:
  // 16 lines of 7 times 7 that belong to one channel lie in 16 pages, and took half as long again.
  NOINLINE void forward_in_order(int64_t unit, int64_t end) const {
    constexpr int64_t LINE = 64 / sizeof(T);  // of a cache
    const int64_t n = nest.applied.n;
    const int64_t *step = nest.kept[0].step;
    each_line(nest.applied, place(unit), 0, nest.applied.count, [&](const Place &first, int64_t) {
      Known<C> known(task, first);
      Place p = first;
      for (int64_t i = unit; i < end; i++) {
        const C hi = known.hi(), rstd = known.rstd(), shift = -known.lo() * rstd;
        const Constants<C> constants = {&hi, &shift, &rstd};
        const T *y = (const T *)job.y + p.at[Y];
        for (int64_t j = 0; j < n; j += LINE) __builtin_prefetch(y + j + 16 * LINE, 1);
        if (job.activation) normalize_and_activate<false>(p, constants, 0, n, 0);
        else normalize<false>(p, constants, 0, n, 0);
        known.step();
        p.at[X] += step[X], p.at[Y] += step[Y], p.at[GRAD] += step[GRAD];
        p.at[AFFINE] += step[AFFINE];
      }
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

  // dx: written in the same sweep, where running statistics normalize (AtOnce).
  template <bool AtOnce>
  INLINE PieceSums flat_sums(const T *g, const T *x, int64_t n, const Unit &u, C weight,
                             T *dx) const {
    Total<V> t1, t2, t3;
    const Standardize<T, false> standardized(u.constants());
    const C first = (C)get(g);  // so that the sum of equal gradients is exact
    const bool rounds = can_round<T> && rounded;
    const bool streamed = AtOnce && job.streamed && can_stream(dx);
    int64_t i = 0;
    do {
      const int64_t end = smaller(n, i + 2 * BLOCK * W);
      V s1[2] = {}, s2[2] = {}, s3[2] = {};
      const auto add = [&](int64_t i, int64_t tail, int j) __attribute__((always_inline)) {
        const V grad = tail ? load(g + i, tail) : load(g + i);
        V v = standardized(tail ? load(x + i, tail) : load(x + i), i, tail);
        if (tail) v = keep(v, tail);
        s1[j] += tail ? keep(grad - first, tail) : grad - first;
        s2[j] = fma(v, grad, s2[j]);
        if (rounds) s3[j] = fma(round_as<T>(v), grad, s3[j]);
        if (!AtOnce) return;
        const V derivative = grad * weight * standardized.rstd(i, tail);
        if (tail) store(dx + i, derivative, tail);
        else write(dx + i, derivative, streamed);
      };
      for (; i + 2 * W <= end; i += 2 * W) add(i, 0, 0), add(i + W, 0, 1);
      if (i + W <= end) add(i, 0, 0), i += W;
      if (i < end) add(i, end - i, 1), i = end;
      t1.add(s1[0] + s1[1]);
      t2.add(s2[0] + s2[1]);
      if (rounds) t3.add(s3[0] + s3[1]);
    } while (i < n);
    PieceSums sums = {};
    sums.grad = (double)first * (double)n + t1.value();
    sums.by_xhat = t2.value();
    sums.by_rounded = rounds ? t3.value() : sums.by_xhat;
    // Of the first element as the derivative rounds it, so that equal ones cancel.
    sums.s1 = (double)weight * t1.value() +
              ((double)(C)(first * weight) - (double)u.first) * (double)n;
    sums.s2 = (double)weight * sums.by_xhat;
    return sums;
  }

  // dw and db are at the weight's first element.
  INLINE PieceSums element_sums(const T *g, const T *x, int64_t n, const Unit &u, const C *w,
                                double *dw, double *db) const {
    Total<V> t1, t2;
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
    PieceSums sums = {};
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
        sums.grad += grad;
        sums.by_xhat += grad * (double)xhat;
        sums.by_rounded += grad * kept;
        sums.s1 += gw - (double)u.first;
        sums.s2 += gw * (double)xhat;
        if (dw) dw[a] += grad * kept, db[a] += grad;
      }
    }
    return sums;
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

  NOINLINE int finish_backward(const Place &at, Unit &u, int64_t unit) const {
    if (u.unsafe && task.sums) add_exact(at, u, unit);
    if (task.running_mean) return u.repair ? 2 : 0;
    const Sums a = merged(u, nest.applied.parts);
    const double count = u.count > 0 ? u.count : 1;
    u.mean = center ? -(C)((double)u.first + a.s / count) : C(0);
    u.slope = -(C)(a.q / divisor_of(task, u.count));
    u.repair |= !finite(u.mean) || !finite(u.slope);
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
