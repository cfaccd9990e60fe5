/* Attention of packed trees on a CPU, forward and backward: each token sees its own span up to itself, and the trunk of its
   tree. Compiled by library.py and called by ops.py, which checks shapes and passes only memory that it owns.

   Products are taken in float32. A head of a tree is one piece of work, computed in the same order whichever thread computes
   it. Queries are taken ROWS at a time, so that what they weigh keys by stays in the cache. */

#include "vectors.h"
#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

#define ROWS 32
#define MOST (LANES > 8 ? 4 : 2) /* vectors whose sums, for four rows, stay in registers */

typedef float *Floats;
typedef const float *Given;

INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* c = a b, or c += a b, for four rows: b is [depth, vectors * LANES]; `..._row` are apart from row to row, and `a_next` from
   one number to the next. */
INLINE void four(
    int vectors, int64_t depth, Given a, int64_t a_row, int64_t a_next, Given b, int64_t b_row, Floats c, int64_t c_row,
    int add
) {
    Vec sums[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) sums[r][i] = add ? *(Vec *)(c + r * c_row + i * LANES) : (Vec){};
    for (int64_t d = 0; d < depth; d++) {
        Vec x[4];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) x[i] = *(const Vec *)(b + d * b_row + i * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const Vec y = all(a[r * a_row + d * a_next]);
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++) sums[r][i] += y * x[i];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) *(Vec *)(c + r * c_row + i * LANES) = sums[r][i];
}

/* The same for `rows`, a multiple of 4, and `width`, one of LANES. */
static void product(
    int64_t rows, int64_t width, int64_t depth, Given a, int64_t a_row, int64_t a_next, Given b, int64_t b_row, Floats c,
    int64_t c_row, int add
) {
    for (int64_t i = 0; i < width; i += MOST * LANES)
        for (int64_t r = 0; r < rows; r += 4) {
            const float *x = a + r * a_row;
            float *y = c + r * c_row + i;
            switch ((width - i) / LANES < MOST ? (width - i) / LANES : MOST) {
            case 1: four(1, depth, x, a_row, a_next, b + i, b_row, y, c_row, add); break;
            case 2: four(2, depth, x, a_row, a_next, b + i, b_row, y, c_row, add); break;
            case 3: four(3, depth, x, a_row, a_next, b + i, b_row, y, c_row, add); break;
            default: four(4, depth, x, a_row, a_next, b + i, b_row, y, c_row, add);
            }
        }
}

/* A run of trees: ops.py lays it out. */
typedef struct {
    int64_t heads, group, dim, bf16, tokens, trees, threads;
    const int64_t *spans;   /* of each tree the first of its spans, and the end: its trunk, then its branches */
    const int64_t *sizes;   /* of each span */
    const int64_t *starts;  /* of each tree, where it begins in the run */
    int64_t width, length;  /* room for the numbers of a head and, with some to spare, for the most keys that one sees */
    float *scratch;
    int64_t room;           /* of each thread there */
} Run;

/* `count` rows of a head to float32 rows of `width`, with zeros after their ends. */
INLINE void unpack(Floats to, const Run *of, const void *from, int64_t first, int64_t step, int64_t count) {
    for (int64_t r = 0; r < count; r++)
        for (int64_t i = 0; i < of->width; i += LANES)
            *(Vec *)(to + r * of->width + i) = load(from, first + r * step + i, of->bf16, i < of->dim ? of->dim - i : 0);
}

INLINE void pack(void *to, const Run *of, int64_t first, int64_t step, Given from, int64_t count) {
    for (int64_t r = 0; r < count; r++)
        for (int64_t i = 0; i < of->dim; i += LANES)
            store(to, first + r * step + i, *(const Vec *)(from + r * of->width + i), of->bf16, of->dim - i);
}

/* `count` rows to columns from `at` on. */
INLINE void turn(Floats to, const Run *of, int64_t at, Given from, int64_t count) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t d = 0; d < of->dim; d++) to[d * of->length + at + j] = from[j * of->width + d];
}

/* Up to ROWS queries of a head: how many, how many with those that fill up a four, where the first one is, and which key is
   the last that it sees. Those that fill up are zeros. */
typedef struct {
    int64_t count, rows, at, last;
} Block;

INLINE Block block_of(const Run *of, int64_t begin, int64_t trunk, int64_t size, int64_t first, int64_t query_head) {
    const int64_t count = size - first < ROWS ? size - first : ROWS;
    const int64_t at = ((begin + first) * of->heads * of->group + query_head) * of->dim;
    return (Block){count, up(count, 4), at, trunk + first};
}

INLINE void unpack_block(Floats to, const Run *of, const void *from, const Block *block) {
    memset(to + block->count * of->width, 0, 4 * (block->rows - block->count) * of->width);
    unpack(to, of, from, block->at, of->heads * of->group * of->dim, block->count);
}

/* Scores of keys up to `last` to what they weigh, which is 1 together. Returns the log of the sum of exponentials. */
INLINE float softmax(Floats row, int64_t wide, int32_t last, float scale) {
    Vec best = all(-INFINITY), total = {};
    for (int64_t j = 0; j < wide; j += LANES) {
        const Vec x = choose(LANE + (int32_t)j <= last, *(Vec *)(row + j) * scale, all(-INFINITY));
        *(Vec *)(row + j) = x, best = greater(x, best);
    }
    const float top = largest(best);
    for (int64_t j = 0; j < wide; j += LANES) {
        const Vec x = exponential(*(Vec *)(row + j) - top);
        *(Vec *)(row + j) = x, total += x;
    }
    const float whole = sum(total), share = 1.0f / whole;
    for (int64_t j = 0; j < wide; j += LANES) *(Vec *)(row + j) *= share;
    return top + logf(whole);
}

/* q and out are [tokens, heads * group, dim], k and v [tokens, heads, dim], logs [heads * group, tokens]. */
void forward(const Run *of, float scale, const void *q, const void *k, const void *v, void *out, float *logs) {
    const int64_t width = of->width, length = of->length, k_step = of->heads * of->dim, q_step = k_step * of->group;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(of->threads)
    for (int64_t tree = 0; tree < of->trees; tree++)
        for (int64_t head = 0; head < of->heads; head++) {
            float *keys = of->scratch + THREAD * of->room; /* [dim, length]; what follows is [..., width] but for weights */
            float *values = keys + length * width, *weights = values + length * width, *query = weights + ROWS * length;
            float *made = query + ROWS * width;
            int64_t begin = of->starts[tree], trunk = 0;
            memset(keys, 0, 8 * length * width);
            for (int64_t span = of->spans[tree]; span < of->spans[tree + 1]; span++) {
                const int64_t size = of->sizes[span], from = begin * k_step + head * of->dim;
                unpack(values + trunk * width, of, k, from, k_step, size);
                turn(keys, of, trunk, values + trunk * width, size);
                unpack(values + trunk * width, of, v, from, k_step, size);
                for (int64_t h = head * of->group; h < (head + 1) * of->group; h++)
                    for (int64_t first = 0; first < size; first += ROWS) {
                        const Block block = block_of(of, begin, trunk, size, first, h);
                        unpack_block(query, of, q, &block);
                        for (int64_t r = 0; r < block.rows; r += 4) {
                            const int64_t seen = block.last + r + 4, wide = up(seen, LANES);
                            float *some = weights + r * length;
                            product(4, wide, of->dim, query + r * width, width, 1, keys, length, some, length, 0);
                            for (int64_t i = r; i < r + 4; i++) {
                                const float log = softmax(weights + i * length, wide, block.last + i, scale);
                                if (i < block.count) logs[h * of->tokens + begin + first + i] = log;
                            }
                            product(4, width, seen, some, length, 1, values, width, made + r * width, width, 0);
                        }
                        pack(out, of, block.at, q_step, made, block.count);
                    }
                begin += size;
                if (!trunk) trunk = size;
            }
        }
}

/* Of queries: what they weighed keys by, and the gradient of their scores, each times `scale`. Rows that fill up are zeros,
   and add nothing whatever they weigh; they have no log. */
INLINE void slopes(
    const Run *of, const Block *block, int64_t wide, float scale, Floats weights, Floats grads, Given given, Given made,
    Given logs
) {
    for (int64_t r = 0; r < block->rows; r++) {
        const int32_t last = block->last + r;
        const float log = r < block->count ? logs[r] : 0;
        Vec both = {};
        for (int64_t i = 0; i < of->width; i += LANES)
            both += *(const Vec *)(given + r * of->width + i) * *(const Vec *)(made + r * of->width + i);
        const float common = sum(both);
        for (int64_t j = 0; j < wide; j += LANES) {
            Vec *weight = (Vec *)(weights + r * of->length + j), *grad = (Vec *)(grads + r * of->length + j);
            const Ints sees = LANE + (int32_t)j <= last;
            *weight = choose(sees, exponential(*weight * scale - log), (Vec){});
            *grad = choose(sees, (*grad - common) * scale * *weight, (Vec){});
        }
    }
}

void backward(
    const Run *of, float scale, const void *grad, const void *q, const void *k, const void *v, const void *out,
    const float *logs, void *dq, void *dk, void *dv
) {
    const int64_t width = of->width, length = of->length, k_step = of->heads * of->dim, q_step = k_step * of->group;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(of->threads)
    for (int64_t tree = 0; tree < of->trees; tree++)
        for (int64_t head = 0; head < of->heads; head++) {
            float *turned_keys = of->scratch + THREAD * of->room, *turned_values = turned_keys + length * width;
            float *keys = turned_values + length * width, *to_keys = keys + length * width;
            float *to_values = to_keys + length * width, *weights = to_values + length * width;
            float *grads = weights + ROWS * length, *query = grads + ROWS * length, *given = query + ROWS * width;
            float *made = given + ROWS * width, *to_query = made + ROWS * width;
            int64_t begin = of->starts[tree], trunk = 0;
            memset(turned_keys, 0, 20 * length * width);
            for (int64_t span = of->spans[tree]; span < of->spans[tree + 1]; span++) {
                const int64_t size = of->sizes[span], from = begin * k_step + head * of->dim, own = trunk * width;
                unpack(keys + own, of, v, from, k_step, size);
                turn(turned_values, of, trunk, keys + own, size);
                unpack(keys + own, of, k, from, k_step, size);
                turn(turned_keys, of, trunk, keys + own, size);
                memset(to_keys + own, 0, 4 * size * width);
                memset(to_values + own, 0, 4 * size * width);
                for (int64_t h = head * of->group; h < (head + 1) * of->group; h++)
                    for (int64_t first = 0; first < size; first += ROWS) {
                        const Block block = block_of(of, begin, trunk, size, first, h);
                        const int64_t rows = block.rows, seen = up(block.last + block.count, 4);
                        const int64_t wide = up(block.last + rows, LANES);
                        unpack_block(query, of, q, &block);
                        unpack_block(given, of, grad, &block);
                        unpack_block(made, of, out, &block);
                        product(rows, wide, of->dim, query, width, 1, turned_keys, length, weights, length, 0);
                        product(rows, wide, of->dim, given, width, 1, turned_values, length, grads, length, 0);
                        const float *log = logs + h * of->tokens + begin + first;
                        slopes(of, &block, wide, scale, weights, grads, given, made, log);
                        product(rows, width, seen, grads, length, 1, keys, width, to_query, width, 0);
                        pack(dq, of, block.at, q_step, to_query, block.count);
                        product(seen, width, rows, weights, 1, length, given, width, to_values, width, 1);
                        product(seen, width, rows, grads, 1, length, query, width, to_keys, width, 1);
                    }
                if (trunk) {
                    pack(dk, of, from, k_step, to_keys + own, size);
                    pack(dv, of, from, k_step, to_values + own, size);
                }
                begin += size;
                if (!trunk) trunk = size;
            }
            const int64_t first = of->starts[tree] * k_step + head * of->dim;
            pack(dk, of, first, k_step, to_keys, trunk);
            pack(dv, of, first, k_step, to_values, trunk);
        }
}
