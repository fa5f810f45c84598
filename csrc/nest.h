// What the two nests of kernels.cpp share: places in the tensors, lines of contiguous elements, masks,
// the slow path for any group.
#pragma once

namespace {

// Offsets into the tensors.
struct Place {
  int64_t at[ARRAYS];
};
INLINE void advance(Place &p, const Loop &loop, int64_t k) {
  // Written out, so that offsets that nobody reads cost nothing.
  p.at[X] += k * loop.step[X];
  p.at[Y] += k * loop.step[Y];
  p.at[GRAD] += k * loop.step[GRAD];
  p.at[DX] += k * loop.step[DX];
  p.at[MASK] += k * loop.step[MASK];
  p.at[AFFINE] += k * loop.step[AFFINE];
  p.at[STATS] += k * loop.step[STATS];
  p.at[RUNNING] += k * loop.step[RUNNING];
  p.at[PIECE] += k * loop.step[PIECE];
}
inline void seek(Place &p, const Loop *loop, int loops, int64_t index) {
  for (int l = loops - 1; l >= 0 && index; l--) {
    // A division takes as long as a short line.
    const bool last = index < loop[l].size;
    advance(p, loop[l], last ? index : index % loop[l].size);
    index = last ? 0 : index / loop[l].size;
  }
}

// Units that are taken together, and where they begin.
template <int N> struct Units {
  int64_t first;
  int count;
  Place at[N];
};

// run(place, index, stop, loop) for the lines [begin, end), in order: those from index to stop follow
// each other along the loop. It leaves the place at the last one.
template <class Run>
INLINE void each_run(const Lines &lines, const Place &start, int64_t begin, int64_t end,
                     const Run &run) {
  if (begin >= end) return;
  Place p = start;
  const int inner = lines.loops > 1 ? lines.loops - 1 : 0;
  const Loop &along = lines.loop[inner];
  int64_t index[MAX_LOOPS], rest = begin;
  for (int l = inner; l > 0; l--) {
    index[l] = rest < lines.loop[l].size ? rest : rest % lines.loop[l].size;
    rest = rest < lines.loop[l].size ? 0 : rest / lines.loop[l].size;
    if (index[l]) advance(p, lines.loop[l], index[l]);
  }
  index[0] = rest;
  if (rest) advance(p, lines.loop[0], rest);
  for (int64_t i = begin;;) {
    const int64_t stop = inner ? smaller(end, i + along.size - index[inner]) : end;
    run(p, i, stop, along);
    i = stop;
    if (i == end) return;
    advance(p, along, 1 - along.size);
    index[inner] = 0;
    for (int l = inner - 1;; l--) {
      advance(p, lines.loop[l], 1);
      if (++index[l] < lines.loop[l].size) break;
      advance(p, lines.loop[l], -lines.loop[l].size);
      index[l] = 0;
    }
  }
}

// f(place, index) for the lines [begin, end), in order.
template <class F>
INLINE void each_line(const Lines &lines, const Place &start, int64_t begin, int64_t end,
                      const F &f) {
  each_run(lines, start, begin, end,
           [&](Place &p, int64_t i, int64_t stop, const Loop &along)
               __attribute__((always_inline)) {
             // Along a loop there is nothing to look at but where it ends.
             for (;;) {
               f(p, i);
               if (++i == stop) break;
               advance(p, along, 1);
             }
           });
}

// One part of the lines of a unit: f(place, line, first element, elements).
template <class F>
INLINE void each_piece(const Lines &lines, const Place &start, int64_t part, const F &f) {
  if (lines.split > 1) {
    const int64_t line = part / lines.split, first = part % lines.split * lines.piece;
    each_line(lines, start, line, line + 1, [&](const Place &p, int64_t i)
                                                __attribute__((always_inline)) {
      f(p, i, first, smaller(lines.piece, lines.n - first));
    });
    return;
  }
  const int64_t begin = part * lines.per_part;
  each_line(lines, start, begin, smaller(lines.count, begin + lines.per_part),
            [&](const Place &p, int64_t i)
                __attribute__((always_inline)) { f(p, i, (int64_t)0, lines.n); });
}

inline double as_double(int32_t dtype, const void *p, int64_t i) {
  return by_type(dtype, [&](auto type) { return get((const decltype(type) *)p + i); });
}

// Whether the next unit is to be fetched: this one leaves half of the second cache to it, and the
// tensor is so large that it is not there already. A fifth is gained from 5 MB on, a tenth lost at 2 MB.
template <class T> inline bool fetches_ahead(const Job &job, const Nest &nest, int64_t unit) {
  return !job.singly && unit * (int64_t)sizeof(T) <= 1 << 19 &&
         nest.groups * nest.group_size * (int64_t)sizeof(T) >= 4 << 20;
}

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// From hi to lo, and from lo to rstd, of the running statistics.
inline int64_t given_pitch(const Nest &nest) { return round_up(nest.channels, 16); }

// out[j] += v[j]
INLINE void add_to(double *out, vd v) { store(out, load(out) + v); }
// The same with the rounding errors kept: what is summed in double is no better than its result.
INLINE void add_to(double *out, double *rest, vd v) {
  const vd s = load(out), t = s + v, z = t - s;
  store(rest, load(rest) + ((s - (t - z)) + (v - z)));
  store(out, t);
}
inline void add_to(double *out, double *rest, double v) {
  const double s = *out, t = s + v, z = t - s;
  *rest += (s - (t - z)) + (v - z);
  *out = t;
}
INLINE void add_to(double *out, vf v) {
  vd half[2];
  widen(v, half);
  store(out, load(out) + half[0]);
  store(out + lanes<double>, load(out + lanes<double>) + half[1]);
}
INLINE void add_to(double *out, double *, vf v) { add_to(out, v); }  // double is better than enough

// ---- masks

// n elements, with `fill` where they are not valid: what stands there has no influence.
template <class T>
INLINE void stage(const T *x, const unsigned char *mask, int64_t step, int64_t n, Scalar<T> fill,
                  Scalar<T> *out) {
  constexpr int W = lanes<T>;
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(x + i));
  if (i < n) store(out + i, load(x + i, n - i), n - i);
  if (step) {
    for (i = 0; i < n; i++) out[i] = mask[i] ? out[i] : fill;
  } else if (!*mask) {
    for (i = 0; i < n; i++) out[i] = fill;
  }
}
template <class T>
INLINE void zero_masked(T *y, const unsigned char *mask, int64_t step, int64_t n) {
  const T zero = {};
  if (step) {
    for (int64_t i = 0; i < n; i++)
      if (!mask[i]) y[i] = zero;
  } else if (!*mask) {
    for (int64_t i = 0; i < n; i++) y[i] = zero;
  }
}
inline int64_t count_valid(const unsigned char *mask, int64_t step, int64_t n) {
  if (!step) return *mask ? n : 0;
  int64_t valid = 0;
  for (int64_t i = 0; i < n; i++) valid += mask[i] != 0;
  return valid;
}
// The first valid element, or n.
inline int64_t first_valid(const unsigned char *mask, int64_t step, int64_t n) {
  if (!step) return *mask ? 0 : n;
  int64_t i = 0;
  while (i < n && !mask[i]) i++;
  return i;
}

// Whether forward is given the statistics: running ones, or with a gradient those that it saved.
inline bool knows_statistics(const Task &task) { return task.running_mean || task.job->grad; }

inline double divisor_of(const Task &task, double count) {
  const double free = count - task.correction;
  return free > 0 ? free : 1;
}

// What the sums of groups are divided by, where so many elements of each are valid.
template <bool Quick> INLINE Sizes<vd, Quick> sizes_of(const Task &task, vd valid) {
  const vd zero = {}, one = broadcast(1.0), left = valid - task.correction;
  return {valid > zero ? valid : one, left > zero ? left : one};
}

// settle for as many groups as a vector of doubles has lanes: hi, lo, rstd and the variance of each
// from the sums around k; which are out of the range of C. Quick: not to the same bits, but as good in
// floats.
template <bool Quick, class C>
INLINE vl settle_some(const Task &task, vd sum, vd q, const Sizes<vd, Quick> &sizes, const C *k, C *hi,
                      C *lo, C *rstd, double *var) {
  const vd high = store_rounded(hi, load_as_double(k));
  return settle(*task.job, high, sum, q, sizes, lo, rstd, var);
}

// ---- a line: the statistics are one for all, or one for each element (PerLane)

// A number for each element, or one for all. Read before the loop: what is written could be taken for it.
template <bool PerElement, class C> struct Parameter {
  typedef typename Compute<C>::vector V;
  const C *p;
  const V all;
  INLINE explicit Parameter(const C *p) : p(p), all(PerElement ? V{} : broadcast(*p)) {}
  INLINE V operator()(int64_t i, int64_t tail) const {
    if (!PerElement) return all;
    return tail ? load(p + i, tail) : load(p + i);
  }
};

template <class C> struct Constants {
  const C *hi, *shift, *rstd;
};

// The standardized elements of a line. Without a mean hi and shift are zero.
template <class T, bool PerLane> struct Standardize {
  typedef Vector<T> V;
  const Parameter<PerLane, Scalar<T>> hi, shift, rstd;
  INLINE explicit Standardize(const Constants<Scalar<T>> &c)
      : hi(c.hi), shift(c.shift), rstd(c.rstd) {}
  INLINE V operator()(V x, int64_t i, int64_t tail) const {
    return fma(x - hi(i, tail), rstd(i, tail), shift(i, tail));
  }
};

// What is read next time comes into the second cache meanwhile.
INLINE void fetch(const void *p) { __builtin_prefetch(p, 0, 2); }

// Where the vectors of a line are written. With a head it is not written past the caches: the lines of memory
// at its ends would be read before, and most such lines are short.
template <class T> struct Output {
  T *const y;
  const bool streamed;
  INLINE Output(T *y, bool streamed) : y(y), streamed(streamed && can_stream(y)) {}
  INLINE void put(int64_t i, Vector<T> v) const { write(y + i, v, streamed); }
  INLINE void put_two(int64_t i, const Vector<T> v[2]) const { write_two(y + i, v, streamed); }
  INLINE void put_last(int64_t i, Vector<T> v) const { store(y + i, v); }
  INLINE void put_part(int64_t i, Vector<T> v, int64_t n) const { store(y + i, v, n); }
};

// out[i] = value(first element, 0) for whole vectors; value(0, elements) where there are less, and for
// the `head` that may stand before. The last one overlaps with the one before it, which takes a tenth
// less of a line of 49 elements than a part of a vector. It is made first: the output may stand in place
// of the input. two(first element) writes two.
template <int W, class T, class Value, class Two>
INLINE void each_vector(int64_t head, int64_t n, const Output<T> &out, const Value &value,
                        const Two &two) {
  const int64_t whole = 0;
  if (n < W) {
    if (n > 0) out.put_part(0, value(whole, n), n);
    return;
  }
  const auto last = value(n - W, whole);
  if (head) out.put_part(0, value(whole, head), head);
  int64_t i = head;
  for (; i + 3 * W <= n; i += 2 * W) two(i);
  for (; i + W < n; i += W) out.put(i, value(i, whole));
  out.put_last(n - W, last);
}
template <int W, class T, class Value>
INLINE void each_vector(int64_t head, int64_t n, const Output<T> &out, const Value &value) {
  each_vector<W>(head, n, out, value, [&](int64_t i) __attribute__((always_inline)) {
    out.put(i, value(i, 0));
    out.put(i + W, value(i + W, 0));
  });
}
// out[i] = value(x[i], i, elements). Uniform: where the element stands does not matter.
template <bool Uniform, class T, class Out, class Value>
INLINE void each_element(const T *x, int64_t ahead, int64_t head, int64_t n, const Output<Out> &out,
                         const Value &value) {
  typedef Vector<T> V;
  constexpr int W = lanes<T>;
  const auto one = [&](int64_t i, int64_t tail) __attribute__((always_inline)) {
    if (ahead) fetch(x + i + ahead);
    return value(tail ? load(x + i, tail) : load(x + i), i, tail);
  };
  if constexpr (Uniform && in_pairs<T> && same<T, Out>) {
    each_vector<W>(head, n, out, one, [&](int64_t i) __attribute__((always_inline)) {
      if (ahead) fetch(x + i + ahead);
      V v[2];
      load_two(x + i, v);
      v[0] = value(v[0], i, 0);
      v[1] = value(v[1], i, 0);
      out.put_two(i, v);
    });
  } else {
    each_vector<W>(head, n, out, one);
  }
}

// Rounding to a type that is computed in itself changes nothing.
template <class T> constexpr bool can_round = !same<T, Scalar<T>>;

template <class C> INLINE bool is_normal(C v) {
  return __builtin_fabs((double)v) >= (double)least_normal<C> && finite(v);
}

// ahead: from an element to the same one of the group that comes next, or 0. Out: T, or what T is
// computed in.
template <class T, bool PerLane, bool PerElement, class Out>
INLINE void apply_line(const T *x, Out *y, int64_t n, const Constants<Scalar<T>> &c, bool given,
                       bool rounded, const Scalar<T> *weight, const Scalar<T> *bias,
                       int64_t ahead, bool streamed) {
  typedef Vector<T> V;
  const Standardize<T, PerLane> standardized(c);
  const Parameter<PerElement, Scalar<T>> w(weight), b(bias);
  const int64_t head = head_of(y, n);
  const Output<Out> out(y, streamed);
  const auto each = [&](const auto &value) __attribute__((always_inline)) {
    each_element<!PerLane && !PerElement>(x, ahead, head, n, out, value);
  };
  // Running statistics do not bound xhat: it may overflow where xhat * weight does not. For a line with one
  // weight the product is made once, which takes a fifth less, unless it is no normal number or what is
  // added to all overflows, which the sums need not.
  const auto once = [&]() __attribute__((always_inline)) {
    return is_normal(*c.rstd * *weight) &&
           finite(fma(standardized.shift(0, 0), w(0, 0), b(0, 0))[0]);
  };
  if (!rounded && (given || (!PerLane && !PerElement && once()))) {
    each([&](V v, int64_t i, int64_t tail) __attribute__((always_inline)) {
      return fma(v - standardized.hi(i, tail), standardized.rstd(i, tail) * w(i, tail),
                 fma(standardized.shift(i, tail), w(i, tail), b(i, tail)));
    });
    return;
  }
  if (can_round<T> && rounded) {
    each([&](V v, int64_t i, int64_t tail) __attribute__((always_inline)) {
      return fma(round_as<T>(standardized(v, i, tail)), w(i, tail), b(i, tail));
    });
    return;
  }
  each([&](V v, int64_t i, int64_t tail) __attribute__((always_inline)) {
    return fma(standardized(v, i, tail), w(i, tail), b(i, tail));
  });
}

// ---- the activation of a line: strips of its values stay in the first cache meanwhile

constexpr int64_t STAGED = 1024;  // elements

template <class T, int Kind>
INLINE void activate(const Scalar<T> *z, const T *grad, T *y, int64_t n, bool streamed) {
  typedef Vector<T> V;
  const Output<T> out(y, streamed);
  const int64_t head = head_of(y, n);
  const auto value = [&](int64_t i, int64_t tail) __attribute__((always_inline)) {
    return tail ? load(z + i, tail) : load(z + i);
  };
  if (!grad)
    each_vector<lanes<T>>(head, n, out, [&](int64_t i, int64_t tail) __attribute__((always_inline)) {
      return activated<Kind>(value(i, tail));
    });
  else
    each_vector<lanes<T>>(head, n, out, [&](int64_t i, int64_t tail) __attribute__((always_inline)) {
      const V g = tail ? load(grad + i, tail) : load(grad + i);
      return derived<Kind>(value(i, tail), g);
    });
}
template <class T>
NOINLINE void activate(int32_t kind, const Scalar<T> *z, const T *grad, T *y, int64_t n,
                       bool streamed) {
  switch (kind) {
    case RELU: return activate<T, RELU>(z, grad, y, n, streamed);
    case SILU: return activate<T, SILU>(z, grad, y, n, streamed);
    default: return activate<T, GELU>(z, grad, y, n, streamed);
  }
}
// norm(i, k, z) gives the k values z from the i-th on.
template <class T, class Norm>
INLINE void each_strip(const Job &job, const T *grad, T *y, int64_t n, const Norm &norm) {
  alignas(VB) Scalar<T> z[STAGED];
  for (int64_t i = 0; i < n; i += STAGED) {
    const int64_t k = smaller(STAGED, n - i);
    norm(i, k, z);
    activate(job.activation, z, grad ? grad + i : nullptr, y + i, k, job.streamed);
  }
}

// dx of a line; mean and slope are minus mean(gw) and minus sum(gw * xhat) / divisor. With running
// statistics, which do not depend on x, neither is there.
template <class T, bool PerLane, bool PerElement>
INLINE void derivative_line(const T *grad, const T *x, T *dx, int64_t n,
                            const Constants<Scalar<T>> &c, const Scalar<T> *mean,
                            const Scalar<T> *slope, const Scalar<T> *weight, bool given,
                            int64_t ahead, bool streamed) {
  typedef Vector<T> V;
  constexpr int W = lanes<T>;
  const Standardize<T, PerLane> standardized(c);
  const Parameter<PerElement, Scalar<T>> w(weight);
  const int64_t head = head_of(dx, n);
  constexpr bool Uniform = !PerLane && !PerElement;
  const Output<T> out(dx, streamed);
  if (given) {
    each_element<Uniform>(grad, 0, head, n, out, [&](V g, int64_t i, int64_t tail)
                                                     __attribute__((always_inline)) {
      return g * w(i, tail) * standardized.rstd(i, tail);
    });
    return;
  }
  const Parameter<PerLane, Scalar<T>> m(mean), s(slope);
  Derivative<T> derivative;
  const auto take = [&](int64_t i, int64_t tail) __attribute__((always_inline)) {
    const Row<T> row = {standardized.hi(i, tail), standardized.shift(i, tail),
                        standardized.rstd(i, tail)};
    derivative.set(row, m(i, tail), s(i, tail));
  };
  if (!PerLane) take(0, 0);
  const auto one = [&](int64_t i, int64_t tail) __attribute__((always_inline)) {
    if (ahead) fetch(x + i + ahead), fetch(grad + i + ahead);
    if (PerLane) take(i, tail);
    const V v = tail ? load(x + i, tail) : load(x + i);
    const V g = tail ? load(grad + i, tail) : load(grad + i);
    return derivative.template of<true>(v, g * w(i, tail));
  };
  if constexpr (Uniform && in_pairs<T>) {
    each_vector<W>(head, n, out, one, [&](int64_t i) __attribute__((always_inline)) {
      if (ahead) fetch(x + i + ahead), fetch(grad + i + ahead);
      V v[2], g[2];
      load_two(x + i, v);
      load_two(grad + i, g);
      for (int j = 0; j < 2; j++) v[j] = derivative.template of<true>(v[j], g[j] * w(i, 0));
      out.put_two(i, v);
    });
  } else {
    each_vector<W>(head, n, out, one);
  }
}

// ---- the slow path for one group: elements [first, first + width) of each line

template <class F>
INLINE void each_valid(const Task &task, const Place &start, int64_t first, int64_t width,
                       const F &f) {
  const Lines &lines = task.nest->applied;
  each_line(lines, start, 0, lines.count, [&](const Place &p, int64_t) {
    for (int64_t i = first; i < first + width; i++)
      if (!task.mask || task.mask[p.at[MASK] + i * task.nest->mask_step]) f(p, i);
  });
}

template <class T>
Exact<T> exact_group(const Task &task, const Place &start, int64_t first, int64_t width,
                     double count) {
  const T *x = (const T *)task.job->x;
  return Exact<T>(*task.job, count > 0 ? count : 1, divisor_of(task, count), [&](const auto &take) {
    each_valid(task, start, first, width,
               [&](const Place &p, int64_t i) { take(get(x + p.at[X] + i)); });
  });
}

// The standardized element by running statistics that the compute type cannot hold well.
struct Given {
  double mean, rstd;
  Given(const Task &task, int64_t channel)
      : mean(task.job->center ? as_double(task.running_mean_dtype, task.running_mean, channel) : 0),
        rstd(reciprocal_root(as_double(task.running_var_dtype, task.running_var, channel) +
                             task.job->eps)) {}
  double standardized(double x) const { return (x - mean) * rstd; }
};

template <class T, class By>
void forward_by(const Task &task, const By &by, const Place &start, int64_t first, int64_t width) {
  typedef Scalar<T> C;
  const int64_t per_element = task.nest->per_element;
  each_valid(task, start, first, width, [&](const Place &p, int64_t i) {
    double v = by.standardized(get((const T *)task.job->x + p.at[X] + i));
    if (task.job->rounded) v = round_as<T>(v);
    const int64_t a = p.at[AFFINE] + i * per_element;
    v = v * (double)((const C *)task.weight)[a] + (double)((const C *)task.bias)[a];
    const T *grad = (const T *)task.job->grad;
    put((T *)task.job->y + p.at[Y] + i,
        finished(*task.job, v, grad ? get(grad + p.at[GRAD] + i) : 0));
  });
}

// The contribution of a group to the sums for the weight: add(place, element, grad * xhat).
template <class T, class By, class F>
void weight_by(const Task &task, const By &by, const Place &start, int64_t first, int64_t width,
               const F &add) {
  each_valid(task, start, first, width, [&](const Place &p, int64_t i) {
    double v = by.standardized(get((const T *)task.job->x + p.at[X] + i));
    if (task.job->rounded) v = round_as<T>(v);
    add(p, i, get((const T *)task.job->grad + p.at[GRAD] + i) * v);
  });
}

template <class T>
void derivative_by(const Task &task, const Exact<T> &exact, const Place &start, int64_t first,
                   int64_t width, double count) {
  typedef Scalar<T> C;
  const Job &job = *task.job;
  const int64_t per_element = task.nest->per_element;
  const auto grad = [&](const Place &p, int64_t i) {
    return get((const T *)job.grad + p.at[GRAD] + i);
  };
  const auto weight = [&](const Place &p, int64_t i) {
    return (double)((const C *)task.weight)[p.at[AFFINE] + i * per_element];
  };
  const auto xhat = [&](const Place &p, int64_t i) {
    return exact.standardized(get((const T *)job.x + p.at[X] + i));
  };
  double largest_g = 0, largest_w = 0;
  each_valid(task, start, first, width, [&](const Place &p, int64_t i) {
    const double g = __builtin_fabs(grad(p, i)), w = __builtin_fabs(weight(p, i));
    if (!(g <= largest_g)) largest_g = g;
    if (!(w <= largest_w)) largest_w = w;
  });
  const int eg = exponent(largest_g), ew = exponent(largest_w);
  const auto scaled = [&](const Place &p, int64_t i) {
    return scale(grad(p, i), -eg) * scale(weight(p, i), -ew);
  };
  Compensated s1, s2;
  double first_one = 0;
  bool any = false;
  each_valid(task, start, first, width, [&](const Place &p, int64_t i) {
    const double gw = scaled(p, i);
    if (!any) first_one = gw;
    any = true;
    s1.add(gw - first_one);
    s2.add(gw * xhat(p, i));
  });
  const double m1 = job.center ? first_one + s1.value() / count : 0;
  const double m2 = s2.value() / divisor_of(task, count);
  each_valid(task, start, first, width, [&](const Place &p, int64_t i) {
    const double v = exact.plain * ((scaled(p, i) - m1) - xhat(p, i) * m2);
    put((T *)job.dx + p.at[DX] + i, scale(v, eg + ew + exact.plain_e));
  });
}
template <class T>
void derivative_by(const Task &task, const Given &given, const Place &start, int64_t first,
                   int64_t width) {
  typedef Scalar<T> C;
  each_valid(task, start, first, width, [&](const Place &p, int64_t i) {
    const double w =
        (double)((const C *)task.weight)[p.at[AFFINE] + i * task.nest->per_element];
    put((T *)task.job->dx + p.at[DX] + i,
        get((const T *)task.job->grad + p.at[GRAD] + i) * w * given.rstd);
  });
}

// Whether the compute type holds the statistics with all their digits. A mean below 2^100 cannot make
// x - mean overflow: it would be rounded away.
template <class C> inline bool given_is_safe(C hi, C rstd) {
  constexpr C most = same<C, float> ? (C)0x1p100 : (C)0x1p900;
  return __builtin_fabs((double)hi) < (double)most && rstd >= least_normal<C> && finite(rstd);
}

// Running or saved statistics of a group, and of those that follow it in a tile of lanes.
template <class C> class Known {
 public:
  Known(const Task &task, const Place &at)
      : running_(task.running_mean),
        pitch_(running_ ? given_pitch(*task.nest) : task.nest->groups),
        step_(running_ ? task.nest->running_step : task.nest->stats_step),
        p_(running_ ? (const C *)task.given + at.at[RUNNING]
                    : (const C *)task.job->stats + at.at[STATS]) {}
  C hi() const { return p_[0]; }
  C lo() const { return p_[pitch_]; }
  C rstd() const { return p_[2 * pitch_]; }
  bool is_safe() const {
    return running_ ? given_is_safe(hi(), rstd()) : !is_unsafe<C, double>(hi(), lo(), rstd());
  }
  void step() { p_ += step_; }

 private:
  bool running_;
  int64_t pitch_, step_;
  const C *p_;
};

}  // namespace
