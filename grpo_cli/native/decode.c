/* A decode step on a CPU around its matrix products: attention over pages, norms, rotation, activation, the draw.

   Compiled by library.py; its callers check shapes and pass only memory that they own. Numbers are float32, or
   bfloat16 where a flag `..._bf16` says so, and are computed in float32. A row is computed by the same instructions in the
   same order wherever it lies in a batch and whichever thread computes it, so its bits depend on nothing else. */

#include "vectors.h"

#include <stdlib.h>

#define MOST_VECTORS (256 / LANES) /* of a head */
#define SUMS (LANES > 8 ? 16 : 12) /* vectors that registers hold, beside others */
#define CHUNK 256                  /* keys whose scores are kept */
#define PAGE 8                     /* keys of a page, an even number: BLOCK of engine/kv_cache.py */
#define MUCH (1 << 16)             /* numbers that are worth waking other threads for */

/* Lane i of the result is the sum of vector i. Vectors are joined in pairs, each time with half as many lanes of each. */
INLINE Vec sums(Vec x[LANES]) {
    enum { B = LANES }; /* the second one's first lane */
    for (int i = 0; LANES > 8 && i < 8; i++)
        x[i] = PAIR(x[i], x[i + LANES / 2], 0, 1, 2, 3, 4, 5, 6, 7, B, B + 1, B + 2, B + 3, B + 4, B + 5, B + 6, B + 7)
             + PAIR(x[i], x[i + LANES / 2], 8, 9, 10, 11, 12, 13, 14, 15, B + 8, B + 9, B + 10, B + 11, B + 12, B + 13, B + 14, B + 15);
    for (int i = 0; i < 4; i++)
        x[i] = PAIR(x[i], x[i + 4], 0, 1, 2, 3, B, B + 1, B + 2, B + 3, 8, 9, 10, 11, B + 8, B + 9, B + 10, B + 11)
             + PAIR(x[i], x[i + 4], 4, 5, 6, 7, B + 4, B + 5, B + 6, B + 7, 12, 13, 14, 15, B + 12, B + 13, B + 14, B + 15);
    for (int i = 0; i < 2; i++)
        x[i] = PAIR(x[i], x[i + 2], 0, 1, B, B + 1, 4, 5, B + 4, B + 5, 8, 9, B + 8, B + 9, 12, 13, B + 12, B + 13)
             + PAIR(x[i], x[i + 2], 2, 3, B + 2, B + 3, 6, 7, B + 6, B + 7, 10, 11, B + 10, B + 11, 14, 15, B + 14, B + 15);
    return PAIR(x[0], x[1], 0, B, 2, B + 2, 4, B + 4, 6, B + 6, 8, B + 8, 10, B + 10, 12, B + 12, 14, B + 14)
         + PAIR(x[0], x[1], 1, B + 1, 3, B + 3, 5, B + 5, 7, B + 7, 9, B + 9, 11, B + 11, 13, B + 13, 15, B + 15);
}

/* What the layers of a step have in common: engine/attention.py lays it out. Of prompts and of a row's own keys: the pages
   [rows, most] that they lie in, PAGE in each, and how many they are; and the page that takes a row's next key. */
typedef struct {
    int64_t rows, heads, group, dim, bf16;
    const int64_t *page, *pages[2];
    int64_t most[2];
    const int64_t *held[2];
} Step;

/* Whether products of bfloat16 are taken two at a time. */
#ifdef __AVX512BF16__
#define IN_PAIRS(bf16, dim) ((bf16) && (dim) % (2 * LANES) == 0)
#else
#define IN_PAIRS(bf16, dim) 0
#endif

/* Some queries of one head: in float32, and in memory. */
typedef struct {
    Vec numbers[4][MOST_VECTORS];
    const char *as_given;
} Queries;

/* The products of some queries and one key, by lane. */
INLINE void multiply(Vec found[4], const char *key, const Queries *queries, int group, int dim, int bf16) {
    const int vectors = (dim + LANES - 1) / LANES;
#pragma GCC unroll 4
    for (int g = 0; g < group; g++) found[g] = (Vec){};
#ifdef __AVX512BF16__
    if (IN_PAIRS(bf16, dim)) {
#pragma GCC unroll 8
        for (int i = 0; i < dim; i += 2 * LANES) {
            const __m512bh x = (__m512bh)_mm512_loadu_si512(key + 2 * i);
#pragma GCC unroll 4
            for (int g = 0; g < group; g++) {
                const __m512bh y = (__m512bh)_mm512_loadu_si512(queries->as_given + 2 * (g * dim + i));
                found[g] = (Vec)_mm512_dpbf16_ps((__m512)found[g], y, x);
            }
        }
        return;
    }
#endif
#pragma GCC unroll 16
    for (int i = 0; i < vectors; i++) {
        const Vec x = load(key, i * LANES, bf16, dim - i * LANES);
#pragma GCC unroll 4
        for (int g = 0; g < group; g++) found[g] += x * queries->numbers[g][i];
    }
}

/* Add `count` weighted values of a page, `few` vectors of each from vector `begin` on; `weights` of a query are CHUNK apart. In pairs,
   two vectors hold numbers 0 to 3, 8 to 11, 16 to 19, 24 to 27 and the others, and weights are rounded as values are. */
INLINE void add_values(
    Vec into[4][MOST_VECTORS], const char *values, int count, const float *weights, int begin, int few, int group, int dim,
    int bf16
) {
    const size_t bytes = dim * (bf16 ? 2 : 4);
    values += begin * LANES * (bf16 ? 2 : 4);
#ifdef __AVX512BF16__
    if (IN_PAIRS(bf16, dim)) {
        uint32_t pairs[4][LANES / 2];
        for (int g = 0; g < group; g++) {
            const __m512 some = _mm512_maskz_loadu_ps((1 << PAGE) - 1, weights + g * CHUNK);
            const __m256i near = (__m256i)_mm512_cvtneps_pbh(some);
            _mm256_storeu_si256((__m256i *)pairs[g], near);
        }
        for (int j = 0; j < count; j += 2) {
            const char *one = values + j * bytes, *other = j + 1 < count ? one + bytes : one; /* whose weight is 0 */
#pragma GCC unroll 8
            for (int i = 0; i < few; i += 2) {
                const __m512i a = _mm512_loadu_si512(one + i * 32), b = _mm512_loadu_si512(other + i * 32);
                const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b), high = (__m512bh)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
                for (int g = 0; g < group; g++) {
                    const __m512bh weight = (__m512bh)_mm512_set1_epi32(pairs[g][j / 2]);
                    into[g][i] = (Vec)_mm512_dpbf16_ps((__m512)into[g][i], weight, low);
                    into[g][i + 1] = (Vec)_mm512_dpbf16_ps((__m512)into[g][i + 1], weight, high);
                }
            }
        }
        return;
    }
#endif
    for (int j = 0; j < count; j++)
#pragma GCC unroll 16
        for (int i = 0; i < few; i++) {
            const Vec value = load(values + j * bytes, i * LANES, bf16, dim - (begin + i) * LANES);
#pragma GCC unroll 4
            for (int g = 0; g < group; g++) into[g][i] += weights[g * CHUNK + j] * value;
        }
}

/* Up to four queries of one row that share a head of keys. Weights are relative to the largest score so far, as in
   FlashAttention (Dao et al. 2022), of CHUNK keys at a time. */
INLINE void attend_some(
    const Step *of, const void *keys, const void *values, int64_t row, int64_t head, const void *query, void *out,
    float *scores, float *received, int group, int dim, float scale, int bf16
) {
    const int vectors = (dim + LANES - 1) / LANES, bytes = dim * (bf16 ? 2 : 4);
    /* As many of a value's vectors at a time, an even number, as leave their sums in registers. */
    const int most = group * vectors > SUMS ? SUMS / group / 2 * 2 : vectors;
    Queries queries;
    Vec total[4], into[4][MOST_VECTORS];
    float top[4], weights[4][CHUNK] __attribute__((aligned(64)));
    queries.as_given = query;
    for (int g = 0; g < group; g++) {
        total[g] = (Vec){}, top[g] = -INFINITY;
        for (int i = 0; i < vectors; i++) {
            into[g][i] = (Vec){};
            if (!IN_PAIRS(bf16, dim)) queries.numbers[g][i] = load(query, g * dim + i * LANES, bf16, dim - i * LANES);
        }
    }
    /* A query's scores, of which the last tile may reach beyond the last page. */
    const int64_t columns = (of->most[0] + of->most[1]) * PAGE + LANES, held[2] = {of->held[0][row], of->held[1][row] + 1};
    for (int s = 0; s < 2; s++) {
        const int64_t *pages = of->pages[s] + row * of->most[s], ahead = s ? of->most[0] * PAGE : 0;
        for (int64_t first = 0; first < held[s]; first += CHUNK) {
            const int count = held[s] - first < CHUNK ? (int)(held[s] - first) : CHUNK;
            size_t places[CHUNK / PAGE];
            Vec best[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
            for (int from = 0; from < count; from += LANES) {
                const int some = count - from < LANES ? count - from : LANES;
                Vec parts[4][LANES];
                for (int page = 0; page < some; page += PAGE) {
                    const size_t at = (pages[(first + from + page) / PAGE] * of->heads + head) * PAGE * bytes;
                    places[(from + page) / PAGE] = at;
                    for (int j = page; j < some && j < page + PAGE; j++) {
                        Vec found[4];
                        multiply(found, (const char *)keys + at + (size_t)(j - page) * bytes, &queries, group, dim, bf16);
#pragma GCC unroll 4
                        for (int g = 0; g < group; g++) parts[g][j] = found[g];
                    }
                }
                for (int j = some; j < LANES; j++) /* there a page may hold anything */
                    for (int g = 0; g < group; g++) parts[g][j] = (Vec){};
#pragma GCC unroll 4
                for (int g = 0; g < group; g++) {
                    const Vec score = choose(LANE < some, sums(parts[g]) * scale, all(-INFINITY));
                    *(Vec *)(weights[g] + from) = score;
                    if (received) memcpy(scores + g * columns + ahead + first + from, &score, sizeof score);
                    best[g] = choose(score > best[g], score, best[g]);
                }
            }
            for (int g = 0; g < group; g++) {
                const float now = largest(best[g]), before = top[g];
                if (!(now <= before)) {
                    const float less = before == -INFINITY ? 0.0f : exponential(all(before - now))[0];
                    total[g] *= less, top[g] = now;
                    for (int i = 0; i < vectors; i++) into[g][i] *= less;
                }
                for (int from = 0; from < count; from += LANES) {
                    const Vec weight = exponential(*(Vec *)(weights[g] + from) - top[g]);
                    *(Vec *)(weights[g] + from) = weight, total[g] += weight;
                }
            }
            for (int begin = 0; begin < vectors; begin += most) {
                const int few = vectors - begin < most ? vectors - begin : most;
                Vec sums_of[4][MOST_VECTORS];
#pragma GCC unroll 4
                for (int g = 0; g < group; g++)
#pragma GCC unroll 16
                    for (int i = 0; i < few; i++) sums_of[g][i] = into[g][begin + i];
                for (int from = 0; from < count; from += PAGE) {
                    const char *page = (const char *)values + places[from / PAGE];
                    const int some = count - from < PAGE ? count - from : PAGE;
                    add_values(sums_of, page, some, weights[0] + from, begin, few, group, dim, bf16);
                }
#pragma GCC unroll 4
                for (int g = 0; g < group; g++)
#pragma GCC unroll 16
                    for (int i = 0; i < few; i++) into[g][begin + i] = sums_of[g][i];
            }
        }
    }
    for (int g = 0; g < group; g++) {
        const float whole = sum(total[g]);
#ifdef __AVX512BF16__
        for (int i = 0; IN_PAIRS(bf16, dim) && i < vectors; i += 2) {
            const Vec low = into[g][i], high = into[g][i + 1];
            into[g][i] = PAIR(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
            into[g][i + 1] = PAIR(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        }
#endif
        for (int i = 0; i < vectors; i++)
            store(out, g * dim + i * LANES, into[g][i] / whole, bf16, dim - i * LANES);
        for (int s = 0; received && s < 2; s++)
            for (int64_t j = s ? of->most[0] * PAGE : 0, end = j + held[s]; j < end; j += LANES) {
                const size_t size = (end - j < LANES ? end - j : LANES) * sizeof *received;
                Vec score, so_far = {};
                memcpy(&score, scores + g * columns + j, sizeof score);
                memcpy(&so_far, received + j, size);
                so_far += exponential(score - top[g]) / (whole * of->group);
                memcpy(received + j, &so_far, size);
            }
    }
}

/* Write each row's key and value, and attend to its prompt's keys and then to its own. q, k, v are [rows, heads * group or
   heads, dim] with rows `..._step` numbers apart; keys and values of the layer are [pages, heads, PAGE, dim]; out is [rows,
   heads * group * dim]. Unless it is null, `received` [rows, heads, all pages * PAGE], of zeros, becomes the attention that
   each key receives, the mean over the group. */
void attend(
    const Step *of, float scale, const void *q, int64_t q_step, const void *k, int64_t k_step, const void *v,
    int64_t v_step, void *keys, void *values, void *out, float *received
) {
    const int64_t rows = of->rows, heads = of->heads, group = of->group, dim = of->dim, bf16 = of->bf16;
    const int64_t *pages = of->pages[1], *held = of->held[1], most = of->most[1], columns = (of->most[0] + most) * PAGE;
    const size_t size = bf16 ? 2 : 4, bytes = dim * size;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            size_t at = ((of->page[row] * heads + head) * PAGE + held[row] % PAGE) * bytes;
            memcpy((char *)keys + at, (const char *)k + (row * k_step + head * dim) * size, bytes);
            memcpy((char *)values + at, (const char *)v + (row * v_step + head * dim) * size, bytes);
        }
#pragma omp parallel for collapse(2) schedule(static) if (rows * heads > 1)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            if (row + 1 < rows) { /* the first keys and values of the next row */
                size_t at = (pages[(row + 1) * most] * heads + head) * PAGE * bytes;
                for (size_t i = 0; i < PAGE * bytes && i < (size_t)(held[row + 1] + 1) * bytes; i += 64) {
                    __builtin_prefetch((const char *)keys + at + i);
                    __builtin_prefetch((const char *)values + at + i);
                }
            }
            float *scores = received ? malloc(4 * (columns + LANES) * sizeof *scores) : NULL;
            float *mine = received ? received + (row * heads + head) * columns : NULL;
            for (int64_t g = 0; g < group; g += 4) {
                const int some = group - g < 4 ? (int)(group - g) : 4;
                const void *query = (const char *)q + (row * q_step + (head * group + g) * dim) * size;
                void *to = (char *)out + ((row * heads + head) * group + g) * bytes;
#define SOME(G, D, H) attend_some(of, keys, values, row, head, query, to, scores, mine, G, D, scale, H)
#define FOR(G, D) if (some == G && dim == D) { if (bf16) SOME(G, D, 1); else SOME(G, D, 0); continue; }
                FOR(1, 64) FOR(2, 64) FOR(3, 64) FOR(4, 64) FOR(1, 128) FOR(2, 128) FOR(3, 128) FOR(4, 128) FOR(2, 24)
                SOME(some, (int)dim, (int)bf16);
            }
            free(scores);
        }
}

/* hidden += delta (where there is one); out = hidden / root mean square * weight, rounded as the modules round it. */
void norm(
    int64_t rows, int64_t width, void *hidden, int64_t bf16, const void *delta, int64_t delta_bf16, const void *weight,
    int64_t weight_bf16, float epsilon, void *out, int64_t out_bf16
) {
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t row = 0; row < rows; row++) {
        const size_t first = row * width;
        Vec squares[2] = {{}, {}};
        for (int64_t i = 0; i < width; i += LANES) {
            Vec x = load(hidden, first + i, bf16, width - i);
            if (delta) {
                x += load(delta, first + i, delta_bf16, width - i);
                if (bf16) x = rounded(x);
                store(hidden, first + i, x, bf16, width - i);
            }
            squares[i / LANES % 2] += x * x;
        }
        const float root = 1.0f / sqrtf(sum(squares[0] + squares[1]) / width + epsilon);
        for (int64_t i = 0; i < width; i += LANES) {
            Vec x = load(hidden, first + i, bf16, width - i) * root;
            if (bf16) x = rounded(x);
            store(out, first + i, x * load(weight, i, weight_bf16, width - i), out_bf16, width - i);
        }
    }
}

/* x <- x * cos + (its halves exchanged) * sin, in place; the first half's sin has its sign. [rows, heads, dim]. */
void rotate(
    int64_t rows, int64_t heads, int64_t dim, void *x, int64_t step, int64_t bf16, const void *cosine, const void *sine,
    int64_t of_bf16
) {
    const int64_t middle = dim / 2;
#pragma omp parallel for schedule(static) if (rows * heads * dim > MUCH)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const size_t at = row * step + head * dim, angle = row * dim;
            for (int64_t i = 0; i < middle; i += LANES) {
                const int64_t n = middle - i, later = middle + i;
                Vec a = load(x, at + i, bf16, n), b = load(x, at + later, bf16, n);
                Vec low = a * load(cosine, angle + i, of_bf16, n) + b * load(sine, angle + i, of_bf16, n);
                Vec high = b * load(cosine, angle + later, of_bf16, n) + a * load(sine, angle + later, of_bf16, n);
                store(x, at + i, low, bf16, n);
                store(x, at + later, high, bf16, n);
            }
        }
}

/* out = gate / (1 + e^-gate) * up; [rows, width] with rows `step` numbers apart, those of `out` being `width` apart. */
void silu(int64_t rows, int64_t width, const void *gate, const void *up, int64_t step, int64_t bf16, void *out) {
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            Vec x = load(gate, row * step + i, bf16, width - i);
            Vec below = choose(x < -87.0f, all(-87.0f), x); /* where e^-x would be infinite */
            x /= 1.0f + exponential(-below);
            if (bf16) x = rounded(x);
            store(out, row * width + i, x * load(up, row * step + i, bf16, width - i), bf16, width - i);
        }
}

#define BLOCK 256 /* tokens that are summed before the float64 sums begin, as in sampling.py */

INLINE float number(const void *from, size_t at, int bf16) {
    uint32_t bits = bf16 ? (uint32_t)((const uint16_t *)from)[at] << 16 : ((const uint32_t *)from)[at];
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* What tokens `i` to `end`, at most LANES, weigh in the draw: 1 for the most probable one. */
INLINE Vec weight_of(const void *logits, size_t first, int64_t i, int64_t end, int bf16, float top, float cold) {
    Vec weight = exponential((load(logits, first + i, bf16, end - i) - top) / cold);
    return end - i < LANES ? choose(LANE < (int32_t)(end - i), weight, (Vec){}) : weight;
}

/* Draw the token in whose part of the unit interval each row's `uniform` lies, as sampling.py's `inverse` does: first the
   block of tokens, then the token. A row of temperature 0 takes the most probable token, with log-probability 0. Numbers
   that are not finite give a log-probability that is not either. */
void draw(
    int64_t rows, int64_t vocabulary, const void *logits, int64_t bf16, const float *temperature, const double *uniform,
    int64_t *tokens, float *logprobs
) {
    const int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const size_t first = row * vocabulary;
        const float cold = temperature[row] > 0 ? temperature[row] : 1;
        Vec most = all(-INFINITY);
        for (int64_t i = 0; i < vocabulary; i += LANES) {
            Vec x = load(logits, first + i, bf16, vocabulary - i);
            most = choose((x > most) & (LANE < (int32_t)(vocabulary - i)), x, most);
        }
        const float top = largest(most);
        double sums[blocks], weights[BLOCK], total = 0;
        int64_t block = 0, token, found = -1;
        for (int64_t b = 0; b < blocks; b++) {
            Vec part = {};
            const int64_t end = (b + 1) * BLOCK < vocabulary ? (b + 1) * BLOCK : vocabulary;
            for (int64_t i = b * BLOCK; i < end; i += LANES) part += weight_of(logits, first, i, end, bf16, top, cold);
            sums[b] = total += sum(part);
        }
        if (temperature[row] == 0 && total == total) {
            for (token = 0; number(logits, first + token, bf16) != top;) token++;
            tokens[row] = token, logprobs[row] = 0;
            continue;
        }
        const double threshold = uniform[row] * total;
        while (block < blocks - 1 && !(sums[block] > threshold)) block++;
        const double below = block ? sums[block - 1] : 0, share = (threshold - below) / (sums[block] - below);
        const int64_t begin = block * BLOCK, end = begin + BLOCK < vocabulary ? begin + BLOCK : vocabulary;
        double inside = 0, so_far = 0;
        for (int64_t i = begin; i < end; i += LANES) {
            float some[LANES];
            Vec x = weight_of(logits, first, i, end, bf16, top, cold);
            memcpy(some, &x, sizeof some);
            for (int64_t j = 0; j < LANES; j++) inside += weights[i - begin + j] = some[j];
        }
        for (token = begin; token < end; token++) {
            so_far += weights[token - begin];
            if (weights[token - begin] > 0) found = token; /* the last such one where a share is rounded to 1 */
            if (so_far > share * inside) break;
        }
        token = found < 0 ? vocabulary - 1 : found;
        tokens[row] = token;
        logprobs[row] = (float)((number(logits, first + token, bf16) - top) / cold - log(total));
    }
}
