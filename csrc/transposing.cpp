#include "transposing.h"

#include <string.h>

#include <algorithm>

#include "threads.h"

namespace axisnorm {
namespace {

struct Axis {
  int64_t size, from, to;  // steps in elements
};
constexpr int MOST = 16;     // axes
constexpr int64_t ALONG = 64;  // elements of a tile along the innermost axis of the source

// to[i][j] = from[j][i] for i < n <= ALONG. Lines of memory are read and written as a whole, once: the
// lines of a column may fall into one set of the first cache.
template <class T>
void transpose_tiles(const T *from, int64_t from_step, T *to, int64_t to_step, int64_t n, int64_t m) {
  constexpr int64_t ACROSS = 64 / sizeof(T);
  alignas(64) T tile[ACROSS][ALONG + ACROSS / 2];
  for (int64_t j = 0; j < m; j += ACROSS) {
    const int64_t columns = std::min(ACROSS, m - j);
    for (int64_t k = 0; k < columns; k++)
      memcpy(tile[k], from + (j + k) * from_step, (size_t)n * sizeof(T));
    for (int64_t i = 0; i < n; i++) {
      T *const row = to + i * to_step + j;
      if (columns == ACROSS)
        for (int64_t k = 0; k < ACROSS; k++) row[k] = tile[k][i];
      else
        for (int64_t k = 0; k < columns; k++) row[k] = tile[k][i];
    }
  }
}

void transpose_tiles(const char *from, char *to, int64_t element_size, const Axis &along,
                     const Axis &across, int64_t n) {
  const auto as = [&](auto type) {
    typedef decltype(type) T;
    transpose_tiles((const T *)from, across.from, (T *)to, along.to, n, across.size);
  };
  if (element_size == 2) as(uint16_t{});
  else if (element_size == 4) as(uint32_t{});
  else as(uint64_t{});
}

}  // namespace

bool transpose(const void *from, void *to, int64_t element_size, int axes, const int64_t *sizes,
               const int64_t *strides) {
  Axis axis[MOST];  // from the innermost of the result on; those that lie together are one
  int count = 0;
  int64_t elements = 1;
  for (int i = axes - 1; i >= 0; i--) {
    if (sizes[i] == 1) continue;
    const bool together = count && strides[i] == axis[count - 1].from * axis[count - 1].size;
    if (together) axis[count - 1].size *= sizes[i];
    else if (count == MOST) return false;
    else axis[count++] = {sizes[i], strides[i], elements};
    elements *= sizes[i];
  }
  Axis *const end = axis + count;
  Axis *const along = std::find_if(axis, end, [](const Axis &a) { return a.from == 1; });
  if (!elements || count < 2 || along == axis || along == end) return false;
  if (element_size != 2 && element_size != 4 && element_size != 8) return false;
  const Axis across = axis[0], inner = *along;
  // The others are around the tiles.
  std::copy(along + 1, end, along);
  std::copy(axis + 1, end - 1, axis);
  const int around = count - 2;
  const int64_t cuts = (inner.size + ALONG - 1) / ALONG;
  const int64_t items = elements / (inner.size * across.size) * cuts;
  parallel(threads_for(items, elements), [&](int64_t part, int64_t parts) {
    for (int64_t item = items * part / parts; item < items * (part + 1) / parts; item++) {
      const int64_t begin = item % cuts * ALONG;
      int64_t rest = item / cuts, source = begin, target = begin * inner.to;
      for (int i = 0; i < around; i++) {
        const int64_t index = rest % axis[i].size;
        rest /= axis[i].size;
        source += index * axis[i].from;
        target += index * axis[i].to;
      }
      transpose_tiles((const char *)from + source * element_size, (char *)to + target * element_size,
                      element_size, inner, across, std::min(ALONG, inner.size - begin));
    }
  });
  return true;
}

}  // namespace axisnorm
