#include "plan.h"

#include <stdlib.h>

#include <algorithm>

namespace axisnorm {
namespace {

// Elements of a part: long enough that merging parts costs nothing, short enough for many threads
// and for the cache.
constexpr int64_t PART = 32768;
constexpr int64_t STEPS = 128;  // of a part of lanes
// Lanes of a tile: many, so that each step is a long run of memory.
constexpr int64_t FEWEST = 128, MOST = 1024, WIDEST = 4096;
// Elements of a tile. In forward one of x and one of y fit into an L2 cache of 1 MB; in backward, where
// each tile may have sums of its own for the weight, fewer and larger ones pay.
constexpr int64_t TILE = 98304, BACKWARD_TILE = 262144;
// Lines shorter than this are lanes where that is possible, and there are steps enough for it to pay.
constexpr int64_t SHORT = 32, ENOUGH = 8, LONGER = 512;
// Lines up to this length are taken in the order of memory where statistics are given.
constexpr int64_t IN_ORDER = 4096;

struct Dimension {
  Loop loop;
  bool reduced, affine, running;
};

int64_t product(const Loop *loop, int n) {
  int64_t p = 1;
  for (int i = 0; i < n; i++) p *= loop[i].size;
  return p;
}

// Whether the inner one continues the outer one in every array that is looked at.
bool continues(const Dimension &outer, const Dimension &inner, unsigned arrays) {
  for (int a = 0; a < ARRAYS; a++)
    if (arrays >> a & 1 && outer.loop.step[a] != inner.loop.step[a] * inner.loop.size) return false;
  return true;
}
constexpr unsigned ALL = 1u << X | 1u << Y | 1u << GRAD | 1u << DX | 1u << MASK | 1u << AFFINE |
                         1u << STATS | 1u << RUNNING;

void cut(Lines &lines, bool lanes) {
  lines.count = product(lines.loop, lines.loops);
  lines.split = 1;
  lines.piece = lines.n;
  if (lanes) {
    lines.per_part = STEPS;
  } else if (lines.n >= LONG) {
    lines.split = (lines.n + PART - 1) / PART;
    lines.piece = PART;
    lines.per_part = 1;
  } else {
    lines.per_part = std::max<int64_t>(1, PART / std::max<int64_t>(1, lines.n));
  }
  lines.parts = lines.split > 1 ? lines.count * lines.split
                                : (lines.count + lines.per_part - 1) / lines.per_part;
}

// Makes all lines of a unit one part.
void join(Lines &lines) {
  lines.split = lines.parts = 1;
  lines.piece = lines.n;
  lines.per_part = lines.count;
}

// Makes a plan, step by step.
class Planner {
 public:
  explicit Planner(const Problem &given) : problem(given) {}

  Plan make() {
    read_axes();
    sort_by_memory();
    if ((plan.refused = refusal())) return plan;
    gather_weight();
    merge_neighbours();
    choose_nest();
    if (nest.lanes) choose_tiles();
    else if (nest.in_order) nest.running_step = dims[count - 2].loop.step[RUNNING];
    remember_order();
    share_out_loops();
    if (!nest.lanes) find_lines();
    place_pieces();
    find_rows();
    return plan;
  }

 private:
  const Problem &problem;
  Plan plan = {};
  Nest &nest = plan.nest;

  Dimension dims[MAX_LOOPS];
  int count = 0;
  int inner = 1;  // how many dimensions the innermost loop consists of
  const Dimension &last() const { return dims[count - 1]; }
  Dimension *outer_end() { return dims + count - inner; }

  // The weight: the dimensions before neighbours were merged, and what is gathered of it.
  Dimension original[MAX_LOOPS];
  int originals = 0;
  bool any_affine = false;
  bool in_order = true;  // it lies in memory order
  bool expand = false;   // one element a lane, though it is the same for some
  int64_t gathered = 1;

  void read_axes() {
    // Logical strides of what is stored densely: the weight, the statistics, running statistics.
    int64_t affine = 1, stats = 1, running = 1;
    nest.group_size = nest.groups = 1;
    for (int i = problem.axes - 1; i >= 0; i--) {
      const Axis &axis = problem.axis[i];
      Dimension d = {};
      d.reduced = axis.reduced;
      d.affine = axis.affine;
      d.running = axis.running;
      d.loop.size = axis.size;
      int64_t *step = d.loop.step;
      step[X] = axis.x;
      step[Y] = problem.has_y ? axis.y : axis.x;
      step[GRAD] = problem.has_grad ? axis.grad : axis.x;
      step[DX] = problem.has_dx ? axis.dx : axis.x;
      step[MASK] = problem.has_mask ? axis.mask : 0;
      if (axis.affine) step[AFFINE] = affine, affine *= axis.size;
      if (!axis.reduced) step[STATS] = stats, stats *= axis.size;
      if (axis.running) step[RUNNING] = running, running *= axis.size;
      (axis.reduced ? nest.group_size : nest.groups) *= axis.size;
      if (axis.size != 1) dims[count++] = d;
    }
    std::reverse(dims, dims + count);
    nest.affine_size = affine;
    nest.channels = running;
  }

  // By the dense one of the tensors; expanded axes keep their place.
  void sort_by_memory() {
    const Array by = problem.has_y ? Y : problem.has_dx ? DX : X;
    std::stable_sort(dims, dims + count, [&](const Dimension &a, const Dimension &b) {
      return llabs(a.loop.step[by]) > llabs(b.loop.step[by]);
    });
    if (count) return;
    dims[count++] = Dimension{};
    dims[0].loop.size = 1;
    // One group of one element, as it would be among others.
    for (Array a : {X, Y, GRAD, DX, STATS}) dims[0].loop.step[a] = 1;
  }

  const char *refusal() const {
    for (Array a : {X, Y, GRAD, DX})
      if (last().loop.step[a] != 1) return "copy: no axis is contiguous in all tensors";
    const int64_t mask = last().loop.step[MASK];
    return mask > 1 || mask < 0 ? "copy: the mask is not contiguous" : nullptr;
  }

  // The weight in memory order.
  void gather_weight() {
    std::copy(dims, dims + count, original);
    originals = count;
    for (int i = count - 1; i >= 0; i--) {
      if (!dims[i].affine) continue;
      any_affine = true;
      in_order &= dims[i].loop.step[AFFINE] == gathered;
      dims[i].loop.step[AFFINE] = gathered;
      gathered *= dims[i].loop.size;
    }
  }

  // Neighbours in memory that play the same roles are one loop.
  void merge_neighbours() {
    for (int i = count - 2; i >= 0; i--) {
      const Dimension &a = dims[i], &b = dims[i + 1];
      if (a.reduced != b.reduced || a.affine != b.affine || a.running != b.running ||
          !continues(a, b, ALL))
        continue;
      dims[i + 1].loop.size *= a.loop.size;
      std::copy(dims + i + 1, dims + count, dims + i);
      count--;
    }
  }

  void choose_nest() {
    nest.mask_step = last().loop.step[MASK];
    nest.fold = 1;
    nest.lanes = !last().reduced;
    nest.per_element = last().affine;
    // One kept loop around the lines, and one of lines of a group around that.
    nest.in_order = problem.has_running && problem.has_y && !problem.has_mask && last().reduced &&
                    !last().affine && last().loop.size <= IN_ORDER && count > 1 && count <= 3 &&
                    !dims[count - 2].reduced && (count == 2 || dims[0].reduced);
    if (!nest.in_order && lanes_share_groups()) {
      const Dimension &groups = dims[count - 2];
      nest.lanes = 1;
      nest.fold = last().loop.size;
      nest.per_element = groups.affine || last().affine;
      expand = nest.per_element && !(groups.affine && last().affine);
      inner = 2;
    }
    for (int i = 0; i < count - 1 && nest.lanes && inner == 1; i++)
      if (dims[i].reduced && dims[i].affine) nest.mixed = nest.per_element;
  }

  // Whether short lines are taken as lanes that share a group: GroupNorm in channels_last, BatchNorm of
  // tiny maps. How many groups there are decides nothing: a group has the same bits among any others.
  bool lanes_share_groups() const {
    const int64_t size = last().loop.size;
    if (!last().reduced || size >= LONGER || count < 2 || dims[count - 2].reduced) return false;
    int64_t steps = 1;
    bool outer_affine = false;
    for (int i = 0; i < count - 2; i++) {
      if (dims[i].reduced) steps *= dims[i].loop.size;
      outer_affine |= dims[i].reduced && dims[i].affine;
    }
    // Longer lines want more steps, and fewer where each element of them has a weight of its own. Where
    // masks and weights of single elements take short lines one by one, lanes pay soon.
    const bool soon = last().affine || problem.has_mask;
    const int64_t enough = size >= SHORT ? (last().affine ? size / 2 : 8 * size)
                           : soon ? ENOUGH : std::max(ENOUGH, 3 * size / 2);
    const unsigned tensors = 1u << X | 1u << Y | 1u << GRAD | 1u << DX | 1u << MASK;
    return steps >= enough && !(outer_affine && any_affine) &&
           continues(dims[count - 2], last(), tensors);
  }

  void choose_tiles() {
    const Dimension *const end = outer_end(), &first = *end;
    nest.width = first.loop.size * (inner == 2 ? last().loop.size : 1);
    nest.stats_step = first.loop.step[STATS];
    nest.running_step = first.loop.step[RUNNING];
    int64_t steps = 1;
    for (const Dimension *d = dims; d < end; d++)
      if (d->reduced) steps *= d->loop.size;
    // Steps that follow each other in memory are read without a gap if a tile takes the whole width,
    // which gains more than staying in the L2 cache: a third of BatchNorm in channels_last.
    const bool dense = nest.width <= MOST && end > dims && end[-1].reduced &&
                       end[-1].loop.step[X] == nest.width;
    // A group lies in one tile.
    const int64_t whole = nest.fold > 1 ? nest.fold : 64;
    const int64_t elements = problem.has_y ? TILE : BACKWARD_TILE;
    const int64_t most =
        nest.fold > 1 ? std::max(WIDEST, whole)
        : dense       ? nest.width
                      : std::clamp(elements / steps / 64 * 64, FEWEST, MOST);
    nest.tiles = (nest.width + most - 1) / most;
    const int64_t even = (nest.width + nest.tiles - 1) / nest.tiles;
    nest.tile = nest.tiles > 1 ? (even + whole - 1) / whole * whole : nest.width;
    nest.tiles = (nest.width + nest.tile - 1) / nest.tile;
  }

  // How the weight is gathered, where it is not as it lies.
  void remember_order() {
    const Dimension *const end = original + originals, *lanes = end;
    if (expand) {
      // Dimensions without a weight are gathered with step 0. The original dimensions of the lanes are
      // the last ones.
      gathered = nest.width;
      for (Dimension *d = outer_end() - 1; d >= dims; d--)
        if (d->affine) d->loop.step[AFFINE] = gathered, gathered *= d->loop.size;
      int64_t size = 1;
      while (size < nest.width) size *= (--lanes)->loop.size;
    }
    if (any_affine && (expand || !in_order)) {
      for (const Dimension *d = original; d < end; d++)
        if (d->affine || d >= lanes) plan.order.loop[plan.order.loops++] = d->loop;
      plan.order.count = product(plan.order.loop, plan.order.loops);
    }
    plan.order.n = nest.affine_size;  // of the parameter as it is given
    nest.affine_size = any_affine ? gathered : 1;
    if (!any_affine) nest.per_element = 0;
  }

  // Each loop around the innermost one is either of units or of the lines or steps of a unit.
  void share_out_loops() {
    for (const Dimension *d = dims; d < outer_end(); d++)
      if (!d->reduced) nest.kept[nest.kept_loops++] = d->loop;
      else nest.applied.loop[nest.applied.loops++] = d->loop;
    if (!nest.lanes) nest.width = nest.tile = nest.tiles = 1;
    nest.outer = product(nest.kept, nest.kept_loops);
    nest.units = nest.outer * nest.tiles;
    nest.applied.n = nest.lanes ? 1 : last().loop.size;
    cut(nest.applied, nest.lanes);
    nest.measured = nest.applied;
  }

  void find_lines() {
    // Statistics do not care where the weight changes.
    Lines &lines = nest.measured;
    while (!problem.has_mask && lines.loops && lines.loop[lines.loops - 1].step[X] == lines.n)
      lines.n *= lines.loop[--lines.loops].size;
    cut(lines, false);
    // Lines may share weights, and then their sums: one after the other.
    if (nest.per_element && nest.applied.count > 1) join(nest.applied);
  }

  // Where the sums of each piece of a line stand, or those of each unit of lanes.
  void place_pieces() {
    int64_t piece = nest.lanes ? 1 : nest.applied.split;
    const auto place = [&](Loop *loop, int loops) {
      for (int l = loops - 1; l >= 0; l--) {
        loop[l].step[PIECE] = piece;
        piece *= loop[l].size;
      }
    };
    if (!nest.lanes) place(nest.applied.loop, nest.applied.loops);
    place(nest.kept, nest.kept_loops);
    if (!nest.lanes) nest.pieces = piece;
  }

  // Plain rows: one line a group, one loop around them, the same weight for all.
  void find_rows() {
    bool affine = false;  // also along axes of one element
    for (int i = 0; i < problem.axes; i++) affine |= problem.axis[i].affine;
    const bool one_weight = !plan.order.loops && plan.order.n == nest.applied.n &&
                            nest.affine_size == plan.order.n &&
                            (nest.per_element || nest.applied.n == 1);
    const bool row = !nest.lanes && nest.applied.loops == 0 && (!affine || one_weight) &&
                     !problem.has_mask && !problem.has_running;
    const bool in_rank = nest.kept_loops == 0 ||
                         (nest.kept_loops == 1 && nest.kept[0].step[STATS] == 1);
    plan.rows = row && in_rank && (affine || nest.applied.n < LONG);
    // Whether rows lie one stride apart may depend on how many there are; their bits do not.
    if (row && affine) join(nest.measured), join(nest.applied);
  }
};

bool is_same(const Axis &a, const Axis &b) {
  return a.size == b.size && a.reduced == b.reduced && a.affine == b.affine &&
         a.running == b.running && a.x == b.x && a.y == b.y && a.grad == b.grad && a.dx == b.dx &&
         a.mask == b.mask;
}
bool is_same(const Problem &a, const Problem &b) {
  return a.axes == b.axes && a.has_y == b.has_y && a.has_grad == b.has_grad &&
         a.has_dx == b.has_dx && a.has_mask == b.has_mask && a.has_running == b.has_running &&
         std::equal(a.axis, a.axis + a.axes, b.axis,
                    [](const Axis &of_a, const Axis &of_b) { return is_same(of_a, of_b); });
}

size_t place_of(const Problem &problem, size_t places) {
  uint64_t hash = problem.has_grad * 2 + problem.has_y;
  for (int i = 0; i < problem.axes; i++)
    hash = (hash + (uint64_t)problem.axis[i].size) * 0x9e3779b97f4a7c15;
  return hash >> 32 & (places - 1);
}

}  // namespace

std::shared_ptr<const Plan> plan_for(const Problem &problem) {
  struct Kept {
    Problem problem;
    Plan plan;
  };
  thread_local std::shared_ptr<const Kept> last[32];
  std::shared_ptr<const Kept> &kept = last[place_of(problem, 32)];
  if (!kept || !is_same(kept->problem, problem))
    kept = std::make_shared<const Kept>(Kept{problem, Planner(problem).make()});
  return {kept, &kept->plan};
}

void set_rows(const Plan &plan, Job &job) {
  const Nest &nest = plan.nest;
  job.rows = nest.outer;
  job.n = nest.applied.n;
  const int64_t *step = nest.kept_loops ? nest.kept[0].step : nullptr;
  job.x_stride = step ? step[X] : job.n;
  job.y_stride = step ? step[Y] : job.n;
  job.grad_stride = step ? step[GRAD] : job.n;
  job.dx_stride = step ? step[DX] : job.n;
}

}  // namespace axisnorm
