/* Ranks within classes of the base's exponent: a part of `_native.c`, which has the types and levels.
 *
 * A value's class is how far its exponent is below a top exponent, 0 and CLASSES - 1 taking in what is beyond. The values
 * are looked at in blocks of 64: one mask for each class, so that ranks are counts of bits. */

enum { CLASSES = 8, BEYOND = 255 };
#define NO_RANK UINT32_MAX
typedef struct { int width, shift; u32 mask, top; } Exponents;
/* `classes` has a byte for each value of a block, BEYOND for those past the end; `masks` a bit. */
typedef struct { u8 classes[64]; u64 masks[CLASSES]; } Block;
typedef void (*Sorter)(Block *, const u8 *, const Exponents *);
typedef u64 (*Deposit)(u64 bits, u64 mask);

static inline u32 class_of(u32 pattern, const Exponents *x) {
    u32 exponent = (pattern >> x->shift) & x->mask, below = x->top > exponent ? x->top - exponent : 0;
    return below < CLASSES - 1 ? below : CLASSES - 1;
}
static inline u32 pattern_at(const u8 *w, size_t i, int width) { return width == 2 ? ld16(w + 2 * i) : ld32(w + 4 * i); }

__attribute__((always_inline)) static inline void classes_of(u8 *out, const u8 *p, size_t count, const Exponents *x) {
    const Exponents e = *x;
    if (e.width == 2) for (size_t i = 0; i < count; i++) out[i] = (u8)class_of(ld16(p + 2 * i), &e);
    else for (size_t i = 0; i < count; i++) out[i] = (u8)class_of(ld32(p + 4 * i), &e);
}

static void masks_of(Block *b) {
    memset(b->masks, 0, sizeof b->masks);
    for (int i = 0; i < 64; i++)
        if (b->classes[i] < CLASSES) b->masks[b->classes[i]] |= (u64)1 << i;
}
static void sort_scalar(Block *b, const u8 *p, const Exponents *x) {
    classes_of(b->classes, p, 64, x);
    masks_of(b);
}
static u64 deposit_scalar(u64 bits, u64 mask) {
    u64 out = 0;
    for (; bits; bits >>= 1, mask &= mask - 1)
        if (bits & 1) out |= mask & (0 - mask);
    return out;
}

#ifdef X86
AVX2 static inline void sort_avx2(Block *b, const u8 *p, const Exponents *x) {
    classes_of(b->classes, p, 64, x);
    __m256i low = _mm256_loadu_si256((const void *)b->classes), high = _mm256_loadu_si256((const void *)(b->classes + 32));
    for (int c = 0; c < CLASSES; c++) {
        __m256i one = _mm256_set1_epi8((char)c);
        b->masks[c] = (u64)(u32)_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, one)) |
                      (u64)(u32)_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, one)) << 32;
    }
}
AVX2 static u64 deposit_bmi2(u64 bits, u64 mask) { return _pdep_u64(bits, mask); }

AVX512 static inline void sort_avx512(Block *b, const u8 *p, const Exponents *x) {
    __m512i all;
    if (x->width == 2) {
        const __m512i mask = _mm512_set1_epi16((short)x->mask), top = _mm512_set1_epi16((short)x->top);
        __m256i half[2];
        for (int h = 0; h < 2; h++) {
            __m512i e = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p + 64 * h), (unsigned)x->shift), mask);
            e = _mm512_min_epu16(_mm512_subs_epu16(top, e), _mm512_set1_epi16(CLASSES - 1));
            half[h] = _mm512_cvtepi16_epi8(e);
        }
        all = _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
        _mm512_storeu_si512(b->classes, all);
    } else {
        const __m512i mask = _mm512_set1_epi32((int)x->mask), top = _mm512_set1_epi32((int)x->top);
        for (int q = 0; q < 4; q++) {
            __m512i e = _mm512_and_si512(_mm512_srli_epi32(_mm512_loadu_si512(p + 64 * q), (unsigned)x->shift), mask);
            e = _mm512_min_epu32(_mm512_sub_epi32(_mm512_max_epu32(top, e), e), _mm512_set1_epi32(CLASSES - 1));
            _mm_storeu_si128((void *)(b->classes + 16 * q), _mm512_cvtepi32_epi8(e));
        }
        all = _mm512_loadu_si512(b->classes);
    }
    for (int c = 0; c < CLASSES; c++) b->masks[c] = _mm512_cmpeq_epi8_mask(all, _mm512_set1_epi8((char)c));
}
#endif

/* A block at the end of the values has fewer than 64. */
static void sort_rest(Block *b, const u8 *p, size_t count, const Exponents *x) {
    memset(b->classes, BEYOND, sizeof b->classes);
    classes_of(b->classes, p, count, x);
    masks_of(b);
}

/* Ascending positions become ranks, class by class, each with its step. `counts` gets the changes of each class and
 * then the values of each. 0: the positions do not ascend below n. */
__attribute__((always_inline)) static inline int rank_with(Sorter sort, const u8 *w, size_t n, const Exponents *x,
                                                           const u32 *pos, const u8 *steps, size_t m, u32 *counts,
                                                           u32 *ranks, u8 *ranked) {
    u32 place[CLASSES], seen[CLASSES] = {0};
    size_t i = 0;
    memset(counts, 0, CLASSES * 4);
    for (size_t j = 0; j < m; j++) {
        if (pos[j] >= n) return 0;
        counts[class_of(pattern_at(w, pos[j], x->width), x)]++;
    }
    for (u32 c = 0, sum = 0; c < CLASSES; sum += counts[c++]) place[c] = sum;
    for (size_t first = 0; first < n; first += 64) {
        Block b;
        const u8 *p = w + first * (size_t)x->width;
        __builtin_prefetch(p + 2048);
        __builtin_prefetch(p + 2048 + 64);
        if (n - first >= 64) sort(&b, p, x);
        else sort_rest(&b, p, n - first, x);
        for (; i < m && pos[i] < first + 64; i++) {
            u64 j = (u64)pos[i] - first;
            if (j >= 64) return 0;
            u32 c = b.classes[j], at = place[c]++;
            ranks[at] = seen[c] + (u32)__builtin_popcountll(b.masks[c] & (((u64)1 << j) - 1));
            if (x->width == 2) st16(ranked + 2 * (size_t)at, ld16(steps + 2 * i));
            else st32(ranked + 4 * (size_t)at, ld32(steps + 4 * i));
        }
        for (int c = 0; c < CLASSES; c++) seen[c] += (u32)__builtin_popcountll(b.masks[c]);
    }
    memcpy(counts + CLASSES, seen, sizeof seen);
    return i == m;
}

/* The inverse. 0: ranks that do not ascend, or beyond their class. */
__attribute__((always_inline)) static inline int unrank_with(Sorter sort, Deposit deposit, const u8 *w, size_t n,
                                                             const Exponents *x, const u32 *counts, const u32 *ranks,
                                                             const u8 *ranked, size_t m, u32 *pos, u8 *steps) {
    const u32 *next[CLASSES], *end[CLASSES];
    const u8 *step[CLASSES];
    u32 seen[CLASSES] = {0}, rank[CLASSES];
    size_t i = 0;
    for (size_t c = 0, sum = 0; c < CLASSES; sum += counts[c++]) {
        next[c] = ranks + sum;
        end[c] = next[c] + counts[c];
        rank[c] = counts[c] ? *next[c] : NO_RANK;
        step[c] = ranked + sum * (size_t)x->width;
    }
    for (size_t first = 0; first < n && i < m; first += 64) {
        Block b;
        u64 changed = 0;
        const u8 *p = w + first * (size_t)x->width;
        __builtin_prefetch(p + 2048);
        __builtin_prefetch(p + 2048 + 64);
        if (n - first >= 64) sort(&b, p, x);
        else sort_rest(&b, p, n - first, x);
        u32 size[CLASSES], hit = 0;
        for (int c = 0; c < CLASSES; c++) {
            size[c] = (u32)__builtin_popcountll(b.masks[c]);
            seen[c] += size[c];
            hit |= (u32)(rank[c] < seen[c]) << c;
        }
        for (; hit; hit &= hit - 1) {
            int c = __builtin_ctz(hit);
            u32 from = seen[c] - size[c];
            u64 bits = 0;
            do {
                if (rank[c] < from) return 0;
                bits |= (u64)1 << (rank[c] - from);
                rank[c] = ++next[c] < end[c] ? *next[c] : NO_RANK;
            } while (rank[c] < seen[c]);
            changed |= deposit(bits, b.masks[c]);
        }
        for (; changed; changed &= changed - 1, i++) {
            unsigned j = (unsigned)__builtin_ctzll(changed), c = b.classes[j];
            pos[i] = (u32)(first + j);
            if (x->width == 2) st16(steps + 2 * i, ld16(step[c]));
            else st32(steps + 4 * i, ld32(step[c]));
            step[c] += x->width;
        }
    }
    /* A rank that came twice left fewer positions; one that was passed over is left itself. */
    for (int c = 0; c < CLASSES; c++)
        if (next[c] != end[c]) return 0;
    return i == m;
}

#define RANK_ARGS const u8 *w, size_t n, const Exponents *x, const u32 *pos, const u8 *steps, size_t m, u32 *counts, u32 *ranks, u8 *ranked
#define UNRANK_ARGS const u8 *w, size_t n, const Exponents *x, const u32 *counts, const u32 *ranks, const u8 *ranked, size_t m, u32 *pos, u8 *steps
static int rank_scalar(RANK_ARGS) { return rank_with(sort_scalar, w, n, x, pos, steps, m, counts, ranks, ranked); }
static int unrank_scalar(UNRANK_ARGS) {
    return unrank_with(sort_scalar, deposit_scalar, w, n, x, counts, ranks, ranked, m, pos, steps);
}
#ifdef X86
AVX2 static int rank_avx2(RANK_ARGS) { return rank_with(sort_avx2, w, n, x, pos, steps, m, counts, ranks, ranked); }
AVX2 static int unrank_avx2(UNRANK_ARGS) {
    return unrank_with(sort_avx2, deposit_bmi2, w, n, x, counts, ranks, ranked, m, pos, steps);
}
AVX512 static int rank_avx512(RANK_ARGS) { return rank_with(sort_avx512, w, n, x, pos, steps, m, counts, ranks, ranked); }
AVX512 static int unrank_avx512(UNRANK_ARGS) {
    return unrank_with(sort_avx512, deposit_bmi2, w, n, x, counts, ranks, ranked, m, pos, steps);
}
#endif
