// Attention of texts on a CPU in float32, forward and backward: query i sees every s-th key up to i, and its own key.
// Unlike torch's kernel it takes values narrower than keys and queries in groups. Logits are computed a tile at a time.
#include <string.h>
#include <algorithm>
#include <vector>

#include "vectors.h"

// Queries and keys of a tile, at most. Two tiles of backward fit the L2 cache. Texts shorter than SHORT have tiles of half the
// queries, because masked logits are a larger share of their tiles.
enum { ROWS = 256, COLUMNS = 512, BACKWARD_ROWS = 128, BACKWARD_COLUMNS = 256, SHORT = 768 };

// BLAS sgemm: matrices by columns.
typedef void (*Gemm)(const char *, const char *, const int *, const int *, const int *, const float *, const float *, const int *,
                     const float *, const int *, const float *, float *, const int *);

// A tensor (texts, positions, heads, .) with the strides of its texts, positions and heads.
struct View {
    float *values;
    ptrdiff_t text, row, head;
    float *of(int b, int h, int position = 0) const { return values + b * text + h * head + position * row; }
};

// Keys and values are packed, [value | key]. Gradients are read and written by the backward alone.
struct Merged {
    View q, packed, out, lse, grad, dq, dpacked;
    int texts, steps, heads, width, value_width, stride, threads;
    float scale;
    Gemm gemm;

    int visible(int i, int start, int columns) const { return std::max(0, std::min(columns, (i + 1) / stride - start)); }
    int slot(int start) const { return start * stride + stride - 1; }  // position of a key
    bool own(int i) const { return (i + 1) % stride; }                 // whether only query i sees key i
};

// c (m, n) = alpha a b + beta c by rows, with a (m, k), or (k, m) if it is transposed, and b (k, n), or (n, k).
enum Transposed { NONE, FIRST, SECOND };
INLINE void multiply(const Merged *at, Transposed which, int m, int n, int k, float alpha, const float *a, ptrdiff_t a_row, const float *b,
                     ptrdiff_t b_row, float beta, float *c, ptrdiff_t c_row) {
    const int a_stride = a_row, b_stride = b_row, c_stride = c_row;
    at->gemm(which == SECOND ? "T" : "N", which == FIRST ? "T" : "N", &n, &m, &k, &alpha, b, &b_stride, a, &a_stride, &beta, c, &c_stride);
}

INLINE float inner(int n, const float *a, const float *b) {
    V sums = {};
    int p = 0;
    for (; p + WIDTH <= n; p += WIDTH) sums += *(const V *)(a + p) * *(const V *)(b + p);
    float sum = total(sums);
    for (; p < n; p++) sum += a[p] * b[p];
    return sum;
}

INLINE float largest(int n, const float *x, float most) {
    V all = V{} + most;
    int p = 0;
    for (; p + WIDTH <= n; p += WIDTH) all = *(const V *)(x + p) > all ? *(const V *)(x + p) : all;
    for (int l = 0; l < WIDTH; l++) most = std::max(most, all[l]);
    for (; p < n; p++) most = std::max(most, x[p]);
    return most;
}

// x = exp(x - shift) -> their sum
INLINE float exponentials(int n, float *x, float shift) {
    V sums = {};
    int p = 0;
    for (; p + WIDTH <= n; p += WIDTH) sums += *(V *)(x + p) = exponential(*(V *)(x + p) - shift);
    float sum = total(sums);
    for (; p < n; p++) sum += x[p] = expf(x[p] - shift);
    return sum;
}

INLINE void scale(int n, float *x, float by) {
    for (int p = 0; p < n; p++) x[p] *= by;
}

INLINE void copy(int rows, int n, const float *from, ptrdiff_t from_row, float *to, ptrdiff_t to_row) {
    for (int i = 0; i < rows; i++) memcpy(to + i * to_row, from + i * from_row, n * sizeof(float));
}

// Fills out and lse.
static void forward(const Merged *m, int b, int h, int first, int rows, float *tile) {
    const int dv = m->value_width, d = m->width, seen = (first + rows) / m->stride;
    const ptrdiff_t slot = m->stride * m->packed.row;
    const float *q = m->q.of(b, h, first);
    float *out = m->out.of(b, h, first), most[ROWS], sum[ROWS];
    for (int i = 0; i < rows; i++) {
        const float *value = m->packed.of(b, h, first + i);
        const bool own = m->own(first + i);
        sum[i] = own;
        most[i] = own ? m->scale * inner(d, q + i * m->q.row, value + dv) : -INFINITY;
        if (own) memcpy(out + i * m->out.row, value, dv * sizeof(float));
        else memset(out + i * m->out.row, 0, dv * sizeof(float));
    }
    for (int start = 0; start < seen; start += COLUMNS) {
        const int columns = std::min<int>(COLUMNS, seen - start);
        const float *value = m->packed.of(b, h, m->slot(start));
        multiply(m, SECOND, rows, columns, d, m->scale, q, m->q.row, value + dv, slot, 0, tile, columns);
        for (int i = 0; i < rows; i++) {
            float *p = tile + i * columns;
            const int visible = m->visible(first + i, start, columns);
            const float before = most[i];
            most[i] = largest(visible, p, before);
            if (most[i] > before) {
                const float by = expf(before - most[i]);
                sum[i] *= by;
                scale(dv, out + i * m->out.row, by);
            }
            sum[i] += exponentials(visible, p, most[i]);
            std::fill(p + visible, p + columns, 0.0f);
        }
        multiply(m, NONE, rows, dv, columns, 1, tile, columns, value, slot, 1, out, m->out.row);
    }
    for (int i = 0; i < rows; i++) {
        scale(dv, out + i * m->out.row, 1 / sum[i]);
        *m->lse.of(b, h, first + i) = most[i] + logf(sum[i]);
    }
}

// Fills dq, and dpacked where only one query sees a key; adds to dpacked of the other keys.
static void backward(const Merged *m, int b, int h, int first, int rows, float *p, float *ds) {
    const int dv = m->value_width, d = m->width, seen = (first + rows) / m->stride;
    const ptrdiff_t slot = m->stride * m->packed.row, d_slot = m->stride * m->dpacked.row;
    const float *q = m->q.of(b, h, first), *g = m->grad.of(b, h, first);
    float *dq = m->dq.of(b, h, first), dot[BACKWARD_ROWS], lse[BACKWARD_ROWS];
    for (int i = 0; i < rows; i++) {
        const int at = first + i;
        const float *query = q + i * m->q.row, *grad = g + i * m->grad.row, *value = m->packed.of(b, h, at), *key = value + dv;
        float *d_query = dq + i * m->dq.row, *d_value = m->dpacked.of(b, h, at), *d_key = d_value + dv;
        dot[i] = inner(dv, grad, m->out.of(b, h, at));
        lse[i] = *m->lse.of(b, h, at);
        if (!m->own(at)) {
            memset(d_query, 0, d * sizeof(float));
            continue;
        }
        const float weight = expf(m->scale * inner(d, query, key) - lse[i]);
        const float by = m->scale * weight * (inner(dv, grad, value) - dot[i]);
        for (int c = 0; c < dv; c++) d_value[c] = weight * grad[c];
        for (int c = 0; c < d; c++) d_key[c] = by * query[c];
        for (int c = 0; c < d; c++) d_query[c] = by * key[c];
    }
    for (int start = 0; start < seen; start += BACKWARD_COLUMNS) {
        const int columns = std::min<int>(BACKWARD_COLUMNS, seen - start);
        const float *value = m->packed.of(b, h, m->slot(start)), *key = value + dv;
        float *d_value = m->dpacked.of(b, h, m->slot(start)), *d_key = d_value + dv;
        multiply(m, SECOND, rows, columns, d, m->scale, q, m->q.row, key, slot, 0, p, columns);
        multiply(m, SECOND, rows, columns, dv, 1, g, m->grad.row, value, slot, 0, ds, columns);
        for (int i = 0; i < rows; i++) {
            float *weight = p + i * columns, *by = ds + i * columns;
            const int visible = m->visible(first + i, start, columns);
            exponentials(visible, weight, lse[i]);
            for (int j = 0; j < visible; j++) by[j] = (by[j] - dot[i]) * weight[j] * m->scale;
            std::fill(weight + visible, weight + columns, 0.0f);
            std::fill(by + visible, by + columns, 0.0f);
        }
        multiply(m, FIRST, columns, dv, rows, 1, p, columns, g, m->grad.row, 1, d_value, d_slot);
        multiply(m, FIRST, columns, d, rows, 1, ds, columns, q, m->q.row, 1, d_key, d_slot);
        multiply(m, NONE, rows, d, columns, 1, ds, columns, key, slot, 1, dq, m->dq.row);
    }
}

extern "C" {

void merged_forward(const Merged *m) {
    const int size = m->steps < SHORT ? ROWS / 2 : ROWS, blocks = (m->steps + size - 1) / size, heads = m->texts * m->heads;
#pragma omp parallel num_threads(m->threads)
    {
        std::vector<float> tile(size * COLUMNS);
#pragma omp for schedule(dynamic)
        for (int task = 0; task < blocks * heads; task++) {  // the longest first
            const int first = (blocks - 1 - task / heads) * size;
            forward(m, task % heads / m->heads, task % m->heads, first, std::min(size, m->steps - first), tile.data());
        }
    }
}

void merged_backward(const Merged *m) {
    const int width = m->value_width + m->width;
#pragma omp parallel num_threads(m->threads)
    {
        std::vector<float> tiles(2 * BACKWARD_ROWS * BACKWARD_COLUMNS);
        float *p = tiles.data(), *ds = p + BACKWARD_ROWS * BACKWARD_COLUMNS;
        // keys and values of one head, because products of rows far apart take longer
        std::vector<float> contiguous(m->packed.row > width ? 2 * (size_t)m->steps * width : 0);
#pragma omp for schedule(dynamic)
        for (int task = 0; task < m->texts * m->heads; task++) {
            const int b = task / m->heads, h = task % m->heads;
            Merged head = *m;
            if (contiguous.size()) {
                copy(m->steps, width, m->packed.of(b, h), m->packed.row, contiguous.data(), width);
                head.packed = {contiguous.data(), 0, width, 0};
                head.dpacked = {contiguous.data() + (size_t)m->steps * width, 0, width, 0};
            }
            for (int i = m->slot(0); i < m->steps; i += m->stride) memset(head.dpacked.of(b, h, i), 0, width * sizeof(float));
            for (int first = 0; first < m->steps; first += BACKWARD_ROWS) backward(&head, b, h, first, std::min<int>(BACKWARD_ROWS, m->steps - first), p, ds);
            if (contiguous.size()) copy(m->steps, width, head.dpacked.of(b, h), width, m->dpacked.of(b, h), m->dpacked.row);
        }
    }
}
}
