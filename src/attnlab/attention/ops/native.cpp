// Parts of a decoding step on a CPU in float32: products of few rows, RMS norms and the gated feed-forward.
// Such products are bound by the reading of the weights, which the loops below do once, in the order of memory.
#include <string.h>
#include <vector>

#include "vectors.h"

enum { WIDE = WIDTH / 4 };  // rows of weights at a time
enum { AHEAD = 8 };  // rows of weights by which loads are announced
enum { GROUP = 6, STRIP = 16 };  // of more than 8 rows of inputs, and of rows of weights, so many at a time

INLINE V vector(const float *w) { return *(const V *)w; }

INLINE V vector(const signed char *w) {
#ifdef __AVX512F__
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)w)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)w)));
#else
    V wide;
    for (int i = 0; i < WIDTH; i++) wide[i] = w[i];
    return wide;
#endif
}

// Of bfloat16, which are the upper halves of floats.
INLINE V vector(const unsigned short *w) {
#ifdef __AVX512F__
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)w)), 16));
#elif defined(__AVX2__)
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)w)), 16));
#else
    I wide;
    for (int i = 0; i < WIDTH; i++) wide[i] = w[i] << 16;
    return (V)wide;
#endif
}

INLINE float number(float w) { return w; }
INLINE float number(signed char w) { return w; }
INLINE float number(unsigned short w) {
    const unsigned wide = (unsigned)w << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

#ifdef __AVX512F__
// The sums of four vectors, by adding halves of two at a time.
INLINE __m128 totals(V a, V b, V c, V d) {
    const __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 second = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(first, second, 0x44), _mm512_shuffle_ps(first, second, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(all), 1)));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#endif

// y = x w^T + b with x (m, k), y (m, n), whose rows are y_row apart, and w (n, k) in float32, bfloat16 or int8; scales (n) or null.
template <class T>
struct Product {
    int m, n, k;
    const float *x;
    const T *w;
    const float *scales, *b;
    float *y;
    int y_row;
};

// Outputs j ... j + R - 1 of rows i ... i + M - 1. Their inputs are x, with distances `next` between rows and `step` between
// vectors. Loads of A rows of weights from `ahead` on are announced.
template <int M, int R, int A, class T>
INLINE void outputs(const Product<T> &at, int i, int j, const float *x, size_t next, size_t step, const T *ahead) {
    V sums[R][M] = {};
    const size_t k = at.k;
    const T *w = at.w + j * k;
    float *y = at.y + (size_t)i * at.y_row + j;
    size_t p = 0;
    const auto add = [&]() __attribute__((always_inline)) {
        V part[R];
        for (int r = 0; r < R; r++) part[r] = vector(w + r * k + p);
        for (int i = 0; i < M; i++) {
            const V column = *(const V *)(x + i * next);
            for (int r = 0; r < R; r++) sums[r][i] += part[r] * column;
        }
        p += WIDTH, x += step;
    };
    constexpr int LINE = 64 / (WIDTH * sizeof(T));  // vectors of a line of the cache
    while (p + LINE * WIDTH <= k) {
        for (int r = 0; r < A; r++) __builtin_prefetch(ahead + r * k + p);
        for (int i = 0; i < LINE; i++) add();
    }
    while (p + WIDTH <= k) add();
#ifdef __AVX512F__
    if constexpr (R == 4)
        if (p == k) {
            for (int i = 0; i < M; i++, y += at.y_row) {
                __m128 four = totals(sums[0][i], sums[1][i], sums[2][i], sums[3][i]);
                if (at.scales) four *= _mm_loadu_ps(at.scales + j);
                if (at.b) four += _mm_loadu_ps(at.b + j);
                _mm_storeu_ps(y, four);
            }
            return;
        }
#endif
    for (int i = 0; i < M; i++, y += at.y_row)
        for (int r = 0; r < R; r++) {
            float sum = total(sums[r][i]);
            for (size_t q = p; q < k; q++) sum += number(w[r * k + q]) * x[i * next + q - p];
            if (at.scales) sum *= at.scales[j + r];
            y[r] = at.b ? sum + at.b[j + r] : sum;
        }
}

template <int R, int A, class T>
INLINE void outputs(int m, const Product<T> &at, int i, int j, const float *x, size_t next, size_t step, const T *ahead) {
    switch (m) {
        case 1: return outputs<1, R, A>(at, i, j, x, next, step, ahead);
        case 2: return outputs<2, R, A>(at, i, j, x, next, step, ahead);
        case 3: return outputs<3, R, A>(at, i, j, x, next, step, ahead);
        case 4: return outputs<4, R, A>(at, i, j, x, next, step, ahead);
        case 5: return outputs<5, R, A>(at, i, j, x, next, step, ahead);
        case 6: return outputs<6, R, A>(at, i, j, x, next, step, ahead);
        case 7: return outputs<7, R, A>(at, i, j, x, next, step, ahead);
        default: return outputs<8, R, A>(at, i, j, x, next, step, ahead);
    }
}

// More than 8 rows are computed in groups of nearly equal size, whose sums fit the registers.
struct Group {
    int first, size;
};

static Group group_of(int m, int groups, int g) {
    const int size = m / groups, longer = m % groups;
    return {g * size + (g < longer ? g : longer), size + (g < longer)};
}

template <class T>
void product(int m, int n, int k, int threads, const float *x, const T *w, const float *scales, const float *b, float *y, int y_row) {
    const Product<T> at = {m, n, k, x, w, scales, b, y, y_row};
    const bool few = m <= 2 * GROUP || k % WIDTH;
    const int groups = m <= 8 ? 1 : (m + GROUP - 1) / GROUP, whole = n / WIDE * WIDE;
    if (few) {  // the weights of a block stay in the first cache
#pragma omp parallel for num_threads(threads) if ((size_t)m * n * k > 65536)
        for (int j = 0; j < whole; j += WIDE)
            for (int g = 0; g < groups; g++) {
                const Group group = group_of(m, groups, g);
                outputs<WIDE, WIDE>(group.size, at, group.first, j, x + (size_t)group.first * k, k, WIDTH, w + (size_t)(j + AHEAD) * k);
            }
    } else {  // the inputs of a group do, vector by vector, and the weights of a strip in the second cache
        static thread_local std::vector<float> memory;
        if (memory.size() < (size_t)m * k) memory.resize((size_t)m * k);
        float *panels = memory.data();
#pragma omp parallel num_threads(threads) if ((size_t)m * n * k > 65536)
        {
#pragma omp for
            for (int g = 0; g < groups; g++) {
                const Group group = group_of(m, groups, g);
                float *to = panels + (size_t)group.first * k;
                for (int p = 0; p < k; p += WIDTH)
                    for (int i = group.first; i < group.first + group.size; i++, to += WIDTH) *(V *)to = *(const V *)(x + (size_t)i * k + p);
            }
#pragma omp for
            for (int first = 0; first < whole; first += STRIP) {
                const int last = first + STRIP < whole ? first + STRIP : whole;
                const T *ahead = w + (size_t)last * k;
                for (int g = 0; g < groups; g++) {
                    const Group group = group_of(m, groups, g);
                    for (int j = first; j < last; j += WIDE, ahead += k)
                        outputs<WIDE, 1>(group.size, at, group.first, j, panels + (size_t)group.first * k, WIDTH, (size_t)group.size * WIDTH, ahead);
                }
            }
        }
    }
    for (int g = 0; g < groups; g++) {
        const Group group = group_of(m, groups, g);
        for (int j = whole; j < n; j++) outputs<1, 1>(group.size, at, group.first, j, x + (size_t)group.first * k, k, WIDTH, w + (size_t)j * k);
    }
}

// g = silu(g) u, elementwise.
static void gated(size_t count, float *g, const float *u) {
    size_t p = 0;
    for (; p + WIDTH <= count; p += WIDTH) {
        const V x = *(const V *)(g + p);
        *(V *)(g + p) = x / (exponential(-x) + 1.0f) * *(const V *)(u + p);
    }
    for (; p < count; p++) g[p] = g[p] / (expf(-g[p]) + 1) * u[p];
}

// C vectors of columns of out (m, width) = p (m, n) v (n, width), with the distances between rows.
template <int M, int C>
INLINE void mixed_columns(int n, const float *p, int p_row, const float *v, int v_row, float *out, int out_row) {
    V sums[M][C] = {};
    for (int t = 0; t < n; t++, v += v_row)
        for (int i = 0; i < M; i++)
            for (int h = 0; h < C; h++) sums[i][h] += *(const V *)(v + h * WIDTH) * p[(size_t)i * p_row + t];
    for (int i = 0; i < M; i++)
        for (int h = 0; h < C; h++) *(V *)(out + (size_t)i * out_row + h * WIDTH) = sums[i][h];
}

template <int M>
INLINE void mixed_rows(int n, int width, const float *p, int p_row, const float *v, int v_row, float *out, int out_row) {
    int c = 0;
    if constexpr (WIDTH == 16)  // the registers have room
        for (; c + 4 * WIDTH <= width; c += 4 * WIDTH) mixed_columns<M, 4>(n, p, p_row, v + c, v_row, out + c, out_row);
    for (; c + 2 * WIDTH <= width; c += 2 * WIDTH) mixed_columns<M, 2>(n, p, p_row, v + c, v_row, out + c, out_row);
    for (; c < width; c++)
        for (int i = 0; i < M; i++) {
            float sum = 0;
            for (int t = 0; t < n; t++) sum += v[(size_t)t * v_row + c] * p[(size_t)i * p_row + t];
            out[(size_t)i * out_row + c] = sum;
        }
}

static void mixed(int m, int n, int width, const float *p, int p_row, const float *v, int v_row, float *out, int out_row) {
    for (; m >= 4; m -= 4, p += 4 * (size_t)p_row, out += 4 * (size_t)out_row) mixed_rows<4>(n, width, p, p_row, v, v_row, out, out_row);
    if (m == 3) mixed_rows<3>(n, width, p, p_row, v, v_row, out, out_row);
    if (m == 2) mixed_rows<2>(n, width, p, p_row, v, v_row, out, out_row);
    if (m == 1) mixed_rows<1>(n, width, p, p_row, v, v_row, out, out_row);
}

// p (m, n) = softmax(scale p) of each row.
static void softmax(int m, int n, float scale, float *p) {
    for (int i = 0; i < m; i++) {
        float *row = p + (size_t)i * n, most = -INFINITY, sum = 0;
        V sums = {}, larger = V{} - INFINITY;
        int t = 0;
        for (; t + WIDTH <= n; t += WIDTH) {
            const V x = *(const V *)(row + t);
            larger = x > larger ? x : larger;
        }
        for (int j = 0; j < WIDTH; j++) most = larger[j] > most ? larger[j] : most;
        for (; t < n; t++) most = row[t] > most ? row[t] : most;
        t = 0;
        for (; t + WIDTH <= n; t += WIDTH) sums += *(V *)(row + t) = exponential((*(V *)(row + t) - most) * scale);
        for (sum = total(sums); t < n; t++) sum += row[t] = expf((row[t] - most) * scale);
        for (t = 0; t < n; t++) row[t] /= sum;
    }
}

// Keys and values of n positions, whose rows are the same distance apart.
struct Segment {
    const float *keys, *values;
    int n;
};

// Attention of m queries (m, width) to a prefix and a text; p (m, sum of n), more (m, v_width).
static void attention(int m, int width, int v_width, int v_row, float scale, const float *q, const Segment (&read)[2], float *p,
                      float *out, float *more) {
    const int n = read[0].n + read[1].n;
    product(m, read[0].n, width, 1, q, read[0].keys, nullptr, nullptr, p, n);
    product(m, read[1].n, width, 1, q, read[1].keys, nullptr, nullptr, p + read[0].n, n);
    softmax(m, n, scale, p);
    mixed(m, read[1].n, v_width, p + read[0].n, n, read[1].values, v_row, out, v_width);
    if (!read[0].n) return;
    mixed(m, read[0].n, v_width, p, n, read[0].values, v_row, more, v_width);
    for (int c = 0; c < m * v_width; c++) out[c] += more[c];
}

// Rotate x (2 half) with separate halves.
static void turn(int half, const float *x, const float *cos, const float *sin, float by, float *out) {
    for (int c = 0; c < half; c++) {
        const float u = x[c], v = x[c + half];
        out[c] = (u * cos[c] - v * sin[c]) * by;
        out[c + half] = (v * cos[c] + u * sin[c]) * by;
    }
}

// Parts of the heads of a row, so that all threads have work.
static int parts_of(int rows, int heads, int threads) { return rows % threads == 0 ? 1 : threads < heads ? threads : heads; }

// Memory of a call for `size` floats.
static float *space(size_t size) {
    static thread_local std::vector<float> floats;
    if (floats.size() < size) floats.resize(size);
    return floats.data();
}

struct Weights {
    const void *values;
    const float *scales, *bias;
    int bits;  // of a value: 32 float32, 16 bfloat16, 8 int8
};

static void apply(int m, int n, int k, int threads, const float *x, const Weights &w, float *y) {
    const auto of = [&](auto *values) { product(m, n, k, threads, x, values, w.scales, w.bias, y, n); };
    if (w.bits == 8)
        of((const signed char *)w.values);
    else if (w.bits == 16)
        of((const unsigned short *)w.values);
    else
        of((const float *)w.values);
}

// The prefixes of rows: `beam` rows have the same one. Positions of prefix and text share slots of `stride` positions.
struct Prefix {
    const long long *lengths;  // (prefixes); null: all have `size` positions
    int size, capacity, beam, stride;
};

// Where the step of a row writes, and how many slots of its text and of its prefix it reads.
struct Place {
    int position, slot, opens, used, before, gate;
};

static Place place_of(const Prefix &prefix, int row, int position, int slot, int opens, int used) {
    const int end = prefix.lengths ? (int)prefix.lengths[row / prefix.beam] : prefix.size, before = end / prefix.stride;
    if (prefix.stride > 1) {  // the first text slot may have begun with the prefix
        const int at = end % prefix.stride + position;
        slot = at / prefix.stride, opens = at % prefix.stride == 0, used = slot + 1;
    }
    return {end + position, slot, opens, used, before, before + slot};
}

// Slots that a row reads, at most.
static int most_read(const Prefix &prefix, int position, int used) {
    return prefix.size / prefix.stride + (prefix.stride > 1 ? (position + prefix.stride - 1) / prefix.stride + 1 : used);
}

// A step of multi-head attention.
struct Heads {
    Weights query, key, value, out;
    const float *cos, *sin;  // (positions, width / 2); null: no rotation
    float *keys, *values;    // (rows, groups, capacity, width)
    const float *prefix_keys, *prefix_values;  // (prefixes, groups, capacity, width)
    Prefix prefix;
    int rows, d, heads, groups, width, capacity;
    float scale;
};

// A step in latent space, of MLA, or MTLA with a gate.
struct Latents {
    Weights query, down, out, gate;
    const float *cos, *sin, *norm, *norm_bias;     // norm: weights (r), null: ones or no norm
    const float *up_key, *up_value, *gate_slots;   // (H, d_n, r) with the scale, (H, r, d_v), (slots, g)
    float *slots;                                  // (rows, capacity, r + d_r)
    const float *prefix_slots;                     // (prefixes, capacity, r + d_r)
    Prefix prefix;
    int rows, d, heads, width, r, turned, gate_width, capacity, norm_kind;  // norm_kind: 0 none, 1 rms, 2 layer
    float scale, eps;
};

extern "C" {
// y (m, n) = x (m, k) w^T + b.
void linear(int m, int n, int k, int threads, const float *x, const Weights *w, float *y) { apply(m, n, k, threads, x, *w, y); }

// y (m, d) = w x / sqrt(mean(x^2) + eps); no w: ones.
void rms_norm(int m, int d, const float *x, const float *w, float eps, float *y) {
    for (int i = 0; i < m; i++, x += d, y += d) {
        V squares = {};
        int p = 0;
        for (; p + WIDTH <= d; p += WIDTH) squares += *(const V *)(x + p) * *(const V *)(x + p);
        float sum = total(squares);
        for (; p < d; p++) sum += x[p] * x[p];
        const float by = 1 / sqrtf(sum / d + eps);
        for (p = 0; p < d; p++) y[p] = w ? x[p] * by * w[p] : x[p] * by;
    }
}

// out (m, d) = z + W3 (silu(W1 n) * W2 n) with z = x + more and n the RMS norm of z.
void feed_forward(int m, int d, int f, int threads, const float *x, const float *more, const float *norm, float eps,
                  const Weights *gate, const Weights *up, const Weights *down, float *out) {
    const size_t size = (size_t)m * d, wide = (size_t)m * f;
    float *normed = space(size + 2 * wide), *inner = normed + size, *factor = inner + wide;
    for (size_t p = 0; p < size; p++) out[p] = x[p] + more[p];
    rms_norm(m, d, out, norm, eps, normed);
    apply(m, f, d, threads, normed, *gate, inner);
    apply(m, f, d, threads, normed, *up, factor);
    gated(wide, inner, factor);
    apply(m, d, f, threads, inner, *down, normed);
    for (size_t p = 0; p < size; p++) out[p] += normed[p];
}

// x (rows, d) -> out (rows, d): store the key and value in `slot`, read the first `used` slots.
void heads_step(const Heads *s, int threads, const float *x, int position, int slot, int opens, int used, float *out) {
    const int wide = s->heads * s->width, narrow = s->groups * s->width, share = s->heads / s->groups, half = s->width / 2;
    const size_t buffer = (size_t)s->capacity * s->width;
    const int most = most_read(s->prefix, position, used);
    float *q = space((size_t)s->rows * (3 * wide + 2 * narrow + s->heads * most)), *key = q + (size_t)s->rows * wide;
    float *value = key + (size_t)s->rows * narrow, *p = value + (size_t)s->rows * narrow;
    float *read = p + (size_t)s->rows * s->heads * most, *more = read + (size_t)s->rows * wide;
    apply(s->rows, wide, s->d, threads, x, s->query, q);
    apply(s->rows, narrow, s->d, threads, x, s->key, key);
    apply(s->rows, narrow, s->d, threads, x, s->value, value);
#pragma omp parallel for num_threads(threads) if ((size_t)s->rows * narrow * most > 65536)
    for (int g = 0; g < s->rows * s->groups; g++) {
        const int row = g / s->groups;
        const Place at = place_of(s->prefix, row, position, slot, opens, used);
        float *keys = s->keys + g * buffer, *values = s->values + g * buffer, *queries = q + (size_t)g * share * s->width;
        float *to = keys + (size_t)at.slot * s->width, *own = key + (size_t)g * s->width;
        memcpy(values + (size_t)at.slot * s->width, value + (size_t)g * s->width, sizeof(float) * s->width);
        if (s->cos) {
            const float *cos = s->cos + (size_t)at.position * half, *sin = s->sin + (size_t)at.position * half;
            turn(half, own, cos, sin, 1, to);
            for (int h = 0; h < share; h++) turn(half, queries + h * s->width, cos, sin, 1, queries + h * s->width);
        } else
            memcpy(to, own, sizeof(float) * s->width);
        const size_t from = (size_t)g * share, to_prefix = ((size_t)(row / s->prefix.beam) * s->groups + g % s->groups) * s->prefix.capacity;
        const float *before = s->prefix_keys + to_prefix * s->width, *before_values = s->prefix_values + to_prefix * s->width;
        const Segment segments[2] = {{before, before_values, at.before}, {keys, values, at.used}};
        attention(share, s->width, s->width, s->width, s->scale, queries, segments, p + from * most, read + from * s->width,
                  more + from * s->width);
    }
    apply(s->rows, s->d, wide, threads, read, s->out, out);
}

// A step of tensor product attention: factors of queries, keys and values, whose token factors are vectors.
struct Factors {
    Weights factors, out;
    const float *cos, *sin, *norm;                             // norm: weights of that of a head's output; null: none
    float *key_head, *key_token, *value_head, *value_token;  // (rows, R, heads, capacity), (rows, R, capacity, width)
    const float *prefix_key_head, *prefix_key_token, *prefix_value_head, *prefix_value_token;
    Prefix prefix;
    int rows, d, heads, width, rank, q_rank, capacity;
    float scale, eps;
};

// x (rows, d) -> out (rows, d): store the factors in `slot`, read the first `used`.
void factors_step(const Factors *s, int threads, const float *x, int position, int slot, int opens, int used, float *out) {
    const int H = s->heads, D = s->width, R = s->rank, ranks = s->q_rank + 2 * R, wide = ranks * (H + D);
    const int most = most_read(s->prefix, position, used);
    float *all = space((size_t)s->rows * (wide + H * (3 * D + 2 * most))), *read = all + (size_t)s->rows * wide, *rest = read + (size_t)s->rows * H * D;
    apply(s->rows, wide, s->d, threads, x, s->factors, all);
    for (int b = 0; b < s->rows; b++) {
        const Place at = place_of(s->prefix, b, position, slot, opens, used);
        const float *cos = s->cos + (size_t)at.position * (D / 2), *sin = s->sin + (size_t)at.position * (D / 2);
        float *head = all + (size_t)b * wide, *token = head + ranks * H, *q = rest + (size_t)b * H * D;
        for (int r = 0; r < s->q_rank + R; r++) turn(D / 2, token + r * D, cos, sin, 1, token + r * D);
        for (int h = 0; h < H; h++)
            for (int c = 0; c < D; c++) {
                float sum = 0;
                for (int r = 0; r < s->q_rank; r++) sum += head[r * H + h] * token[r * D + c];
                q[h * D + c] = sum;
            }
        for (int r = 0; r < 2 * R; r++) {
            const size_t from = (size_t)b * R + r % R;
            float *heads = (r < R ? s->key_head : s->value_head) + from * H * s->capacity;
            for (int h = 0; h < H; h++) heads[(size_t)h * s->capacity + at.slot] = head[(s->q_rank + r) * H + h];
            float *to = (r < R ? s->key_token : s->value_token) + (from * s->capacity + at.slot) * D;
            memcpy(to, token + (s->q_rank + r) * D, sizeof(float) * D);
        }
    }
    const int parts = parts_of(s->rows, H, threads);
#pragma omp parallel for num_threads(threads) if ((size_t)s->rows * R * D * most > 65536)
    for (int i = 0; i < s->rows * parts; i++) {
        const int b = i / parts, first = H * (i % parts) / parts, n = H * (i % parts + 1) / parts - first;
        const size_t from = (size_t)b * H + first, to = b / s->prefix.beam;
        float *q = rest + from * D, *part = rest + ((size_t)s->rows * H + from) * D, *out_b = read + from * D;
        float *p = rest + (size_t)s->rows * H * 2 * D + from * 2 * most, *more = p + (size_t)n * most;
        const Place at = place_of(s->prefix, b, position, slot, opens, used);
        const int all_read = at.before + at.used;
        for (int segment = at.before ? 0 : 1; segment < 2; segment++) {
            const int count = segment ? at.used : at.before, capacity = segment ? s->capacity : s->prefix.capacity;
            const float *heads = segment ? s->key_head : s->prefix_key_head, *tokens = segment ? s->key_token : s->prefix_key_token;
            for (int r = 0; r < R; r++) {
                const size_t at_r = (segment ? b : to) * R + r;
                product(n, count, D, 1, q, tokens + at_r * capacity * D, nullptr, nullptr, more, count);
                for (int h = 0; h < n; h++) {
                    const float *by = heads + (at_r * H + first + h) * capacity, *in = more + (size_t)h * count;
                    float *sum = p + (size_t)h * all_read + (segment ? at.before : 0);
                    for (int t = 0; t < count; t++) sum[t] = (r ? sum[t] : 0) + in[t] * by[t];
                }
            }
        }
        softmax(n, all_read, s->scale, p);
        memset(out_b, 0, sizeof(float) * n * D);
        for (int segment = at.before ? 0 : 1; segment < 2; segment++) {
            const int count = segment ? at.used : at.before, capacity = segment ? s->capacity : s->prefix.capacity;
            const float *heads = segment ? s->value_head : s->prefix_value_head;
            const float *tokens = segment ? s->value_token : s->prefix_value_token;
            for (int r = 0; r < R; r++) {
                const size_t at_r = (segment ? b : to) * R + r;
                for (int h = 0; h < n; h++) {
                    const float *by = heads + (at_r * H + first + h) * capacity;
                    const float *in = p + (size_t)h * all_read + (segment ? at.before : 0);
                    for (int t = 0; t < count; t++) more[(size_t)h * count + t] = in[t] * by[t] / R;
                }
                mixed(n, count, D, more, count, tokens + at_r * capacity * D, D, part, D);
                for (int c = 0; c < n * D; c++) out_b[c] += part[c];
            }
        }
        if (s->norm) rms_norm(n, D, out_b, s->norm, s->eps, out_b);
    }
    apply(s->rows, s->d, H * D, threads, read, s->out, out);
}

// x (rows, d) -> out (rows, d): write slot `slot`, or with a gate merge into it unless `opens`, and read the first `used`.
void latents_step(const Latents *s, int threads, const float *x, int position, int slot, int opens, int used, float *out) {
    const int row = s->r + s->turned, half = s->turned / 2, head = s->width + s->turned, r = s->r;
    const int most = most_read(s->prefix, position, used);
    float *q = space((size_t)s->rows * (s->heads * (head + row + most + 2 * r + s->width) + row + s->gate_width));
    float *new_row = q + (size_t)s->rows * s->heads * head, *hidden = new_row + (size_t)s->rows * row;
    float *mapped = hidden + (size_t)s->rows * s->gate_width, *p = mapped + (size_t)s->rows * s->heads * row;
    float *read = p + (size_t)s->rows * s->heads * most, *values = read + (size_t)s->rows * s->heads * r;
    float *more = values + (size_t)s->rows * s->heads * s->width;
    apply(s->rows, s->heads * head, s->d, threads, x, s->query, q);
    apply(s->rows, row, s->d, threads, x, s->down, new_row);
    for (int b = 0; b < s->rows; b++) {
        float *latent = new_row + (size_t)b * row, mean = 0, squares = 0;
        if (!s->norm_kind) continue;
        if (s->norm_kind == 2)
            for (int c = 0; c < r; c++) mean += latent[c];
        mean /= r;
        for (int c = 0; c < r; c++) squares += (latent[c] - mean) * (latent[c] - mean);
        const float by = 1 / sqrtf(squares / r + s->eps);
        for (int c = 0; c < r; c++) {
            latent[c] = (latent[c] - mean) * by * (s->norm ? s->norm[c] : 1);
            if (s->norm_bias) latent[c] += s->norm_bias[c];
        }
    }
    for (int b = 0; b < s->rows; b++) {
        const Place at = place_of(s->prefix, b, position, slot, opens, used);
        float *to = s->slots + ((size_t)b * s->capacity + at.slot) * row, *latent = new_row + (size_t)b * row, by = 1;
        if (s->gate_width) {
            float *gate = hidden + (size_t)b * s->gate_width, sum = 0;
            apply(1, s->gate_width, r, 1, latent, s->gate, gate);
            for (int c = 0; c < s->gate_width; c++) sum += gate[c] * s->gate_slots[(size_t)at.gate * s->gate_width + c];
            by = 1 / (1 + expf(-sum));
        }
        for (int c = 0; c < r; c++) to[c] = (at.opens ? 0 : to[c]) + latent[c] * by;
        if (half) turn(half, latent + r, s->cos + (size_t)at.position * half, s->sin + (size_t)at.position * half, 1, to + r);
    }
    const int H = s->heads, parts = parts_of(s->rows, H, threads);
#pragma omp parallel num_threads(threads) if ((size_t)H * r * (s->width + s->rows * most) > 65536)
    {
#pragma omp for
        for (int h = 0; h < H; h++) {
            mixed(s->rows, s->width, r, q + h * head, H * head, s->up_key + (size_t)h * s->width * r, r, mapped + h * row, H * row);
            for (int b = 0; half && b < s->rows; b++) {
                const size_t at = (size_t)place_of(s->prefix, b, position, slot, opens, used).position * half, from = (size_t)b * H + h;
                turn(half, q + from * head + s->width, s->cos + at, s->sin + at, s->scale, mapped + from * row + r);
            }
        }
#pragma omp for
        for (int i = 0; i < s->rows * parts; i++) {
            const int b = i / parts, first = H * (i % parts) / parts, last = H * (i % parts + 1) / parts;
            const Place at = place_of(s->prefix, b, position, slot, opens, used);
            const float *slots = s->slots + (size_t)b * s->capacity * row;
            const float *before = s->prefix_slots + (size_t)(b / s->prefix.beam) * s->prefix.capacity * row;
            const Segment segments[2] = {{before, before, at.before}, {slots, slots, at.used}};
            const size_t from = (size_t)b * H + first;
            attention(last - first, row, r, row, 1, mapped + from * row, segments, p + from * most, read + from * r, more + from * r);
        }
#pragma omp for
        for (int h = 0; h < H; h++)
            mixed(s->rows, r, s->width, read + h * r, H * r, s->up_value + (size_t)h * r * s->width, s->width, values + h * s->width, H * s->width);
    }
    apply(s->rows, s->d, s->heads * s->width, threads, values, s->out, out);
}
}
