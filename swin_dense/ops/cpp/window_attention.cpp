// Window attention for float32 on a CPU: one window and head at a time, with scores that never leave the cache.
//
// Reads qkv in raster order and writes the output in raster order, so that no token is moved for the sake of windows.
// Geometry and masks are those of swin_dense/windows.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int kLanes = 16;  // one AVX-512 register; the compiler splits it into two or four where registers are smaller
constexpr int kRows = 4;    // queries at a time: 4 x 4 accumulators fit the registers
constexpr float kRegionPenalty = -100.0f;

typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes), aligned(4)));

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec splat(float x) { return Vec{} + x; }
inline Vec select(IntVec mask, Vec a, Vec b) { return (Vec)((mask & (IntVec)a) | (~mask & (IntVec)b)); }

// exp for arguments of at most zero, to within two units in the last place; zero below -87.
inline Vec exponential(Vec x) {
  const Vec low = splat(-87.0f);
  const IntVec vanishes = x < low;
  x = select(vanishes, low, x);
  const Vec shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = (x * 1.44269504088896341f + shifter) - shifter;
  Vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return select(vanishes, Vec{}, p * (Vec)power);
}

inline float largest(const float* x, int count) {
  Vec best = load(x);
  for (int j = kLanes; j < count; j += kLanes) best = select(load(x + j) > best, load(x + j), best);
  float out = best[0];
  for (int lane = 1; lane < kLanes; ++lane) out = std::max(out, best[lane]);
  return out;
}

struct Shape {
  int64_t height, width, channels, window_h, window_w, shift_h, shift_w;
  int heads, dim, tokens, padded;  // tokens per window, and the same rounded up to whole registers
  float scale;
};

// The memory of one thread: one window and head.
struct Scratch {
  std::vector<float> q, k_t, v, scores, regions;
  std::vector<int64_t> raster;  // position of every token in the map, -1 for padding

  explicit Scratch(const Shape& s)
      : q((s.tokens + kRows) * s.dim), k_t(s.dim * s.padded), v(s.tokens * s.dim), scores(kRows * s.padded),
        regions(s.padded), raster(s.tokens) {}
};

// Number the region of a position of the rolled map along one axis, as windows.region_ids does.
inline int region(int64_t position, int64_t length, int64_t window, int64_t shift) {
  return shift == 0 ? 0 : (position >= length - window) + (position >= length - shift);
}

// Find the tokens of a window; return whether they belong to more than one region.
bool locate(const Shape& s, int64_t row, int64_t column, int64_t rows, int64_t columns, Scratch& m) {
  const int64_t full_h = rows * s.window_h, full_w = columns * s.window_w;
  bool differ = false;
  for (int t = 0; t < s.tokens; ++t) {
    const int64_t y = row * s.window_h + t / s.window_w, x = column * s.window_w + t % s.window_w;
    const int64_t source_y = (y + s.shift_h) % full_h, source_x = (x + s.shift_w) % full_w;
    m.raster[t] = source_y < s.height && source_x < s.width ? source_y * s.width + source_x : -1;
    const int id = 3 * region(y, full_h, s.window_h, s.shift_h) + region(x, full_w, s.window_w, s.shift_w);
    m.regions[t] = static_cast<float>(id);
    differ |= m.regions[t] != m.regions[0];
  }
  return differ;
}

void gather(const Shape& s, const float* qkv, const float* pad, int head, Scratch& m) {
  const int64_t c = s.channels;
  for (int t = 0; t < s.tokens; ++t) {
    float* q = &m.q[t * s.dim];
    float* v = &m.v[t * s.dim];
    const float* key = nullptr;
    if (m.raster[t] >= 0) {
      const float* source = qkv + m.raster[t] * 3 * c + head * s.dim;
      for (int d = 0; d < s.dim; ++d) q[d] = source[d] * s.scale;
      key = source + c;
      std::memcpy(v, source + 2 * c, s.dim * sizeof(float));
    } else {
      std::fill(q, q + s.dim, 0.0f);
      if (pad) {
        key = pad + head * s.dim;
        std::memcpy(v, pad + c + head * s.dim, s.dim * sizeof(float));
      } else {
        std::fill(v, v + s.dim, 0.0f);
      }
    }
    for (int d = 0; d < s.dim; ++d) m.k_t[d * s.padded + t] = key ? key[d] : 0.0f;
  }
}

// scores[r] = q[r] . k + bias, for kRows queries and Count registers of keys.
template <int Count>
void score(const Shape& s, const float* q, const float* k_t, float* scores) {
  Vec sum[kRows][Count] = {};
  for (int d = 0; d < s.dim; ++d) {
    for (int n = 0; n < Count; ++n) {
      const Vec key = load(k_t + d * s.padded + n * kLanes);
      for (int r = 0; r < kRows; ++r) sum[r][n] += q[r * s.dim + d] * key;
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int n = 0; n < Count; ++n) store(scores + r * s.padded + n * kLanes, sum[r][n]);
}

// target[r] = scores[r] . v / sum for Count registers of channels from d on; padding has no target.
template <int Count>
void combine(const Shape& s, const Scratch& m, int d, const float* inverse, float* const* targets) {
  Vec sum[kRows][Count] = {};
  for (int j = 0; j < s.tokens; ++j) {
    for (int n = 0; n < Count; ++n) {
      const Vec value = load(&m.v[j * s.dim + d + n * kLanes]);
      for (int r = 0; r < kRows; ++r) sum[r][n] += m.scores[r * s.padded + j] * value;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    if (!targets[r]) continue;
    for (int n = 0; n < Count; ++n) store(targets[r] + d + n * kLanes, sum[r][n] * inverse[r]);
  }
}

void attend(const Shape& s, const float* bias, bool masked, int head, float* out, Scratch& m) {
  for (int first = 0; first < s.tokens; first += kRows) {
    const float* q = &m.q[first * s.dim];
    int done = 0;
    for (; done + 4 * kLanes <= s.padded; done += 4 * kLanes) score<4>(s, q, &m.k_t[done], &m.scores[done]);
    for (; done < s.padded; done += kLanes) score<1>(s, q, &m.k_t[done], &m.scores[done]);

    const int rows = std::min(kRows, s.tokens - first);
    float inverse[kRows] = {};
    for (int r = 0; r < rows; ++r) {
      float* line = &m.scores[r * s.padded];
      const float* extra = bias + (static_cast<int64_t>(head) * s.tokens + first + r) * s.padded;
      const Vec own = splat(m.regions[first + r]);
      for (int j = 0; j < s.padded; j += kLanes) {
        Vec x = load(line + j) + load(extra + j);
        if (masked) x += select(load(&m.regions[j]) != own, splat(kRegionPenalty), Vec{});
        store(line + j, x);
      }
      const Vec top = splat(largest(line, s.padded));
      Vec total = {};
      for (int j = 0; j < s.padded; j += kLanes) {
        const Vec e = exponential(load(line + j) - top);
        store(line + j, e);
        total += e;
      }
      float sum = 0.0f;
      for (int lane = 0; lane < kLanes; ++lane) sum += total[lane];
      inverse[r] = 1.0f / sum;
    }
    float* targets[kRows] = {};
    for (int r = 0; r < rows; ++r) {
      const int64_t token = m.raster[first + r];
      if (token >= 0) targets[r] = out + token * s.channels + head * s.dim;
    }
    int d = 0;
    for (; d + 2 * kLanes <= s.dim; d += 2 * kLanes) combine<2>(s, m, d, inverse, targets);
    for (; d < s.dim; d += kLanes) combine<1>(s, m, d, inverse, targets);
  }
}

at::Tensor window_attention(const at::Tensor& qkv, const std::optional<at::Tensor>& bias,
                            const std::optional<at::Tensor>& pad, int64_t heads, at::IntArrayRef window,
                            at::IntArrayRef shift, double scale) {
  const at::Tensor input = qkv.contiguous();
  Shape s;
  s.height = input.size(1);
  s.width = input.size(2);
  s.channels = input.size(3) / 3;
  s.window_h = window[0];
  s.window_w = window[1];
  s.shift_h = shift[0];
  s.shift_w = shift[1];
  s.heads = static_cast<int>(heads);
  s.dim = static_cast<int>(s.channels / heads);
  s.tokens = static_cast<int>(window[0] * window[1]);
  s.padded = (s.tokens + kLanes - 1) / kLanes * kLanes;
  s.scale = static_cast<float>(scale);
  TORCH_CHECK(input.scalar_type() == at::kFloat && s.dim % kLanes == 0, "needs float32 and head dims that 16 divides");

  // Keys that only fill up registers get a bias of minus infinity, hence no weight.
  at::Tensor full_bias = at::full({heads, s.tokens, s.padded}, -std::numeric_limits<float>::infinity(), input.options());
  at::Tensor real_bias = full_bias.narrow(2, 0, s.tokens);
  if (bias) {
    real_bias.copy_(*bias);
  } else {
    real_bias.zero_();
  }
  const at::Tensor pad_kv = pad ? pad->contiguous() : at::Tensor();
  const float* pad_data = pad ? pad_kv.const_data_ptr<float>() : nullptr;

  at::Tensor out = at::empty({input.size(0), s.height, s.width, s.channels}, input.options());
  const float* in_data = input.const_data_ptr<float>();
  const float* bias_data = full_bias.const_data_ptr<float>();
  float* out_data = out.mutable_data_ptr<float>();
  const int64_t rows = (s.height + s.window_h - 1) / s.window_h, columns = (s.width + s.window_w - 1) / s.window_w;
  const int64_t pixels = s.height * s.width;
  at::parallel_for(0, input.size(0) * rows * columns, 1, [&](int64_t begin, int64_t end) {
    Scratch m(s);
    for (int64_t index = begin; index < end; ++index) {
      const int64_t image = index / (rows * columns), place = index % (rows * columns);
      const bool masked = locate(s, place / columns, place % columns, rows, columns, m);
      for (int head = 0; head < s.heads; ++head) {
        gather(s, in_data + image * pixels * 3 * s.channels, pad_data, head, m);
        attend(s, bias_data, masked, head, out_data + image * pixels * s.channels, m);
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(swin_dense, library) {
  library.def(
      "cpp_window_attention(Tensor qkv, Tensor? bias, Tensor? pad, int num_heads, int[2] window, int[2] shift, "
      "float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(swin_dense, CPU, library) { library.impl("cpp_window_attention", window_attention); }
