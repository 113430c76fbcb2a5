/* The codec's inner loops. `kernels.py` documents each function; `numpy_kernels.py` is the reference implementation.
 *
 * No function reads or writes outside its buffers, whatever their content: sizes are checked before a loop, contents
 * within it. Functions return None for bits that no encoder writes. The GIL is released during the work. SIMD is
 * selected at run time: LEVEL is 0 for plain C, 1 for AVX2, 2 for AVX-512 with VBMI2 (Ice Lake, Zen 4).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if !defined(__GNUC__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "needs GCC or Clang and a little-endian machine; without this extension numpy does the work"
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#define X86 1
#define AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,bmi,bmi2,popcnt")))
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

enum { SLACK = 64 }; /* extra elements of an output array: whole vectors are stored */
enum { BLOCK = 4096 }; /* changes decoded at a time */
enum { MAX_K = 24, MAX_FIELD = 31, MAX_VALUES = 1 << 30, PARAMS_BYTES = 24 };
static int level = 0;

static inline u16 ld16(const u8 *p) { u16 v; memcpy(&v, p, 2); return v; }
static inline u32 ld32(const u8 *p) { u32 v; memcpy(&v, p, 4); return v; }
static inline u64 ld64(const u8 *p) { u64 v; memcpy(&v, p, 8); return v; }
static inline void st16(u8 *p, u16 v) { memcpy(p, &v, 2); }
static inline void st32(u8 *p, u32 v) { memcpy(p, &v, 4); }
static inline void st64(u8 *p, u64 v) { memcpy(p, &v, 8); }
static inline u64 padded(u64 bits) { return (bits + 63) / 64 * 8; }

/* Map bit patterns to integers in the order of the numbers, and back. */
static inline u16 map16(u16 x) { return x ^ (u16)(((int16_t)x >> 15) | 0x8000); }
static inline u16 unmap16(u16 u) { return u ^ (u16)(((int16_t)~u >> 15) | 0x8000); }
static inline u32 map32(u32 x) { return x ^ ((u32)((int32_t)x >> 31) | 0x80000000u); }
static inline u32 unmap32(u32 u) { return u ^ ((u32)((int32_t)~u >> 31) | 0x80000000u); }

/* ---- diff: positions and steps of the differences between two arrays ---- */

static size_t diff_from(const u8 *a, const u8 *b, size_t from, size_t n, int width, size_t m, u32 *pos, u8 *steps) {
    for (size_t i = from; i < n;) {
        if ((i * width) % 8 == 0 && (n - i) * width >= 8 && ld64(a + i * width) == ld64(b + i * width)) {
            i += 8 / width;
            continue;
        }
        if (width == 2) {
            u16 x = ld16(a + 2 * i), y = ld16(b + 2 * i);
            if (x != y) { pos[m] = (u32)i; st16(steps + 2 * m++, map16(y) - map16(x)); }
        } else {
            u32 x = ld32(a + 4 * i), y = ld32(b + 4 * i);
            if (x != y) { pos[m] = (u32)i; st32(steps + 4 * m++, map32(y) - map32(x)); }
        }
        i++;
    }
    return m;
}

#ifdef X86
/* The values whose bits are set in `mask` (of 64) differ. */
static inline size_t diff_marked(const u8 *a, const u8 *b, size_t i, u64 mask, int width, size_t m, u32 *pos, u8 *st) {
    for (; mask; mask &= mask - 1) {
        size_t at = i + (size_t)__builtin_ctzll(mask);
        pos[m] = (u32)at;
        if (width == 2) st16(st + 2 * m++, map16(ld16(b + 2 * at)) - map16(ld16(a + 2 * at)));
        else st32(st + 4 * m++, map32(ld32(b + 4 * at)) - map32(ld32(a + 4 * at)));
    }
    return m;
}

AVX2 static size_t diff_avx2(const u8 *a, const u8 *b, size_t n, int width, u32 *pos, u8 *steps) {
    size_t m = 0, per = 64 / (size_t)width, i = 0;
    for (; i + per <= n; i += per) {
        const u8 *p = a + i * width, *q = b + i * width;
        __builtin_prefetch(p + 2048);
        __builtin_prefetch(q + 2048);
        __m256i x0 = _mm256_loadu_si256((const void *)p), x1 = _mm256_loadu_si256((const void *)(p + 32));
        __m256i y0 = _mm256_loadu_si256((const void *)q), y1 = _mm256_loadu_si256((const void *)(q + 32));
        __m256i d = _mm256_or_si256(_mm256_xor_si256(x0, y0), _mm256_xor_si256(x1, y1));
        if (_mm256_testz_si256(d, d)) continue;
        u64 same;
        if (width == 2) {
            same = (u64)(u32)_mm256_movemask_epi8(_mm256_cmpeq_epi16(x0, y0)) |
                   (u64)(u32)_mm256_movemask_epi8(_mm256_cmpeq_epi16(x1, y1)) << 32;
            m = diff_marked(a, b, i, _pext_u64(~same, 0x5555555555555555ull), 2, m, pos, steps);
        } else {
            same = (u64)(u32)_mm256_movemask_epi8(_mm256_cmpeq_epi32(x0, y0)) |
                   (u64)(u32)_mm256_movemask_epi8(_mm256_cmpeq_epi32(x1, y1)) << 32;
            m = diff_marked(a, b, i, _pext_u64(~same, 0x1111111111111111ull), 4, m, pos, steps);
        }
    }
    return diff_from(a, b, i, n, width, m, pos, steps);
}

AVX512 static inline __m512i map16_512(__m512i x) {
    return _mm512_xor_si512(x, _mm512_or_si512(_mm512_srai_epi16(x, 15), _mm512_set1_epi16((short)0x8000)));
}
AVX512 static inline __m512i unmap16_512(__m512i u) {
    __m512i not_u = _mm512_xor_si512(u, _mm512_set1_epi32(-1));
    return _mm512_xor_si512(u, _mm512_or_si512(_mm512_srai_epi16(not_u, 15), _mm512_set1_epi16((short)0x8000)));
}
AVX512 static inline __m512i map32_512(__m512i x) {
    return _mm512_xor_si512(x, _mm512_or_si512(_mm512_srai_epi32(x, 31), _mm512_set1_epi32((int)0x80000000u)));
}
AVX512 static inline __m512i iota8(void) {
    u64 w[8];
    for (u64 i = 0; i < 8; i++) w[i] = 0x0706050403020100ull + i * 0x0808080808080808ull;
    return _mm512_loadu_si512(w);
}
AVX512 static inline __m512i iota16(void) {
    return _mm512_cvtepu8_epi16(_mm512_castsi512_si256(iota8()));
}
AVX512 static inline __m512i iota32(void) {
    return _mm512_cvtepu8_epi32(_mm512_castsi512_si128(iota8()));
}
AVX512 static inline __m512i upper16_of16(__m512i x) { return _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1)); }
AVX512 static inline __m512i lower16_of16(__m512i x) { return _mm512_cvtepu16_epi32(_mm512_castsi512_si256(x)); }

/* Compares a block first and lists its differing vectors, which avoids branch misses while they are unpacked. */
AVX512 static size_t diff_avx512(const u8 *a, const u8 *b, size_t n, int width, u32 *pos, u8 *steps) {
    enum { VECTORS = 128 };
    const size_t per = 64 / (size_t)width, whole = n / per;
    const __m512i index = iota32(), index16 = iota16();
    u32 marks[VECTORS], listed[VECTORS + 16];
    size_t m = 0;
    for (size_t v0 = 0; v0 < whole; v0 += VECTORS) {
        size_t count = whole - v0 < VECTORS ? whole - v0 : VECTORS, found = 0;
        const u8 *p = a + v0 * 64, *q = b + v0 * 64;
        for (size_t j = 0; j < count; j++) {
            __builtin_prefetch(p + 64 * j + 8192);
            __builtin_prefetch(q + 64 * j + 8192);
            __m512i x = _mm512_loadu_si512(p + 64 * j), y = _mm512_loadu_si512(q + 64 * j);
            marks[j] = width == 2 ? (u32)_mm512_cmpneq_epi16_mask(x, y) : (u32)_mm512_cmpneq_epi32_mask(x, y);
        }
        for (size_t j = count; j < VECTORS; j++) marks[j] = 0;
        for (size_t j = 0; j < VECTORS; j += 16) {
            __m512i mark = _mm512_loadu_si512(marks + j);
            __mmask16 some = _mm512_test_epi32_mask(mark, mark);
            __m512i numbers = _mm512_add_epi32(index, _mm512_set1_epi32((int)j));
            _mm512_storeu_si512(listed + found, _mm512_maskz_compress_epi32(some, numbers));
            found += (size_t)__builtin_popcount(some);
        }
        for (size_t t = 0; t < found; t++) {
            size_t j = listed[t];
            __m512i x = _mm512_loadu_si512(p + 64 * j), y = _mm512_loadu_si512(q + 64 * j);
            __m512i first = _mm512_set1_epi32((int)((v0 + j) * per));
            if (width == 2) {
                __mmask32 k = marks[j];
                __m512i step = _mm512_maskz_compress_epi16(k, _mm512_sub_epi16(map16_512(y), map16_512(x)));
                __m512i place = _mm512_maskz_compress_epi16(k, index16);
                _mm512_storeu_si512(steps + 2 * m, step);
                _mm512_storeu_si512(pos + m, _mm512_add_epi32(first, lower16_of16(place)));
                if (__builtin_popcount(k) > 16)
                    _mm512_storeu_si512(pos + m + 16, _mm512_add_epi32(first, upper16_of16(place)));
                m += (size_t)__builtin_popcount(k);
            } else {
                __mmask16 k = (__mmask16)marks[j];
                __m512i step = _mm512_maskz_compress_epi32(k, _mm512_sub_epi32(map32_512(y), map32_512(x)));
                _mm512_storeu_si512(steps + 4 * m, step);
                _mm512_storeu_si512(pos + m, _mm512_add_epi32(first, _mm512_maskz_compress_epi32(k, index)));
                m += (size_t)__builtin_popcount(k);
            }
        }
    }
    return diff_from(a, b, whole * per, n, width, m, pos, steps);
}
#endif

/* ---- add: apply steps ---- */

static void add_at(u8 *w, const u32 *pos, const u8 *steps, size_t m, int width) {
    enum { AHEAD = 64 };
    if (width == 2) {
        for (size_t i = 0; i < m; i++) {
            if (i + AHEAD < m) __builtin_prefetch(w + 2 * (size_t)pos[i + AHEAD], 1);
            u8 *p = w + 2 * (size_t)pos[i];
            st16(p, unmap16((u16)(map16(ld16(p)) + ld16(steps + 2 * i))));
        }
    } else {
        for (size_t i = 0; i < m; i++) {
            if (i + AHEAD < m) __builtin_prefetch(w + 4 * (size_t)pos[i + AHEAD], 1);
            u8 *p = w + 4 * (size_t)pos[i];
            st32(p, unmap32(map32(ld32(p)) + ld32(steps + 4 * i)));
        }
    }
}

static u32 largest(const u32 *pos, size_t m) {
    u32 found = 0;
    for (size_t i = 0; i < m; i++) found = pos[i] > found ? pos[i] : found;
    return found;
}

static void add_marked(u8 *w, size_t first, const u8 *bits, size_t bytes, const u8 *steps, int width) {
    for (size_t at = 0; at < bytes; at += 8)
        for (u64 x = ld64(bits + at); x; x &= x - 1, steps += width) {
            size_t i = first + at * 8 + (size_t)__builtin_ctzll(x);
            if (width == 2) st16(w + 2 * i, unmap16((u16)(map16(ld16(w + 2 * i)) + ld16(steps))));
            else st32(w + 4 * i, unmap32(map32(ld32(w + 4 * i)) + ld32(steps)));
        }
}

#ifdef X86
AVX512 static u32 largest_avx512(const u32 *pos, size_t m) {
    __m512i found = _mm512_setzero_si512();
    size_t i = 0;
    for (; i + 16 <= m; i += 16) found = _mm512_max_epu32(found, _mm512_loadu_si512(pos + i));
    u32 one = _mm512_reduce_max_epu32(found), other = largest(pos + i, m - i);
    return one > other ? one : other;
}

/* Steps of 16 bits only; they are followed by SLACK elements. */
AVX512 static void add_marked_avx512(u8 *w, size_t n, const u8 *bits, size_t bytes, const u8 *steps) {
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        u64 both = ld64(bits + i / 8);
        for (int half = 0; half < 2; half++) {
            __mmask32 k = (__mmask32)(both >> (32 * half));
            if (!k) continue;
            u8 *p = w + 2 * i + 64 * half;
            __m512i step = _mm512_maskz_expand_epi16(k, _mm512_loadu_si512(steps));
            steps += 2 * __builtin_popcount(k);
            __m512i value = map16_512(_mm512_loadu_si512(p));
            _mm512_storeu_si512(p, unmap16_512(_mm512_add_epi16(value, step)));
        }
    }
    add_marked(w, i, bits + i / 8, bytes - i / 8, steps, 2);
}
#endif

/* ---- bits: fields of some width, unary codes ---- */

typedef struct { u8 *p; u64 held; unsigned bits; } Writer;
/* Appends at most 32 bits; may write up to 8 bytes past the end of the written data. */
__attribute__((always_inline)) static inline void put(Writer *w, u64 field, unsigned bits) {
    w->held |= field << w->bits;
    w->bits += bits;
    if (w->bits >= 32) {
        st32(w->p, (u32)w->held);
        w->p += 4;
        w->held >>= 32;
        w->bits -= 32;
    }
}
static inline size_t finish(Writer *w, u8 *start) {
    st64(w->p, w->held);
    size_t bytes = padded((u64)(w->p - start) * 8 + w->bits);
    if ((size_t)(w->p - start) + 8 < bytes) memset(w->p + 8, 0, bytes - (size_t)(w->p - start) - 8);
    return bytes;
}
/* Reads a field of at most 31 bits; 8 bytes from its first byte must be readable. */
static inline u32 field_at(const u8 *p, u64 bit, unsigned bits) {
    return (u32)(ld64(p + (bit >> 3)) >> (bit & 7)) & (((u32)1 << bits) - 1);
}

/* A unary code: zeros, then a one, for each number. `out` is zeroed. Has no branch on the end of a word. */
typedef struct { u8 *out; size_t size; u64 word, at, bit; int full; } Unary;
__attribute__((always_inline)) static inline void put_unary(Unary *u, u64 zeros) {
    u64 one = u->bit + zeros, at = one >> 6;
    if (__builtin_expect(at * 8 + 8 > u->size || zeros > one, 0)) { u->full = 1; return; }
    u->word = (u->word & ((u64)0 - (at == u->at))) | (u64)1 << (one & 63);
    st64(u->out + at * 8, u->word);
    u->at = at;
    u->bit = one + 1;
}

/* The high bits of the gaps, above the low k bits. */
static Unary pack_high(const u32 *pos, size_t m, int k, Unary u) {
    u32 next = 0;
    memset(u.out, 0, u.size);
    for (size_t i = 0; i < m && !u.full; i++) {
        put_unary(&u, (pos[i] - next) >> k);
        next = pos[i] + 1;
    }
    return u;
}

/* The low k bits of the gaps, eight at a time while they fit in two words. Needs 16 bytes after the section. */
static void pack_low(const u32 *pos, size_t m, int k, u8 *out) {
    const u32 mask = ((u32)1 << k) - 1;
    Writer w = {out, 0, 0};
    size_t i = 0;
    u32 next = 0;
    if (k < 16)
        for (; i + 8 <= m; i += 8) {
            u64 half[2];
            for (int h = 0; h < 2; h++) {
                const u32 *p = pos + i + 4 * h;
                u64 a = (p[0] - next) & mask, b = (p[1] - p[0] - 1) & mask;
                u64 c = (p[2] - p[1] - 1) & mask, d = (p[3] - p[2] - 1) & mask;
                half[h] = a | b << k | c << 2 * k | d << 3 * k;
                next = p[3] + 1;
            }
            st64(w.p, half[0] | half[1] << 4 * k);
            st64(w.p + 8, (half[1] >> 1) >> (63 - 4 * k));
            w.p += k;
        }
    for (; i < m; i++) {
        put(&w, (pos[i] - next) & mask, (unsigned)k);
        next = pos[i] + 1;
    }
    finish(&w, out);
}

/* Decode positions from a Rice code, one by one, continuing at `at`. Returns 0 for an invalid code. */
typedef struct { u64 next, ended; size_t i; } Place;

static int rice_tail(const u8 *low, size_t count, int k, u64 n, u32 *out, Place *at) {
    for (; at->i < count; at->i++) {
        u64 high = out[at->i] - at->ended;
        at->ended = (u64)out[at->i] + 1;
        u64 pos = at->next + (high << k) + (k ? field_at(low, (u64)at->i * (u64)k, (unsigned)k) : 0);
        if (pos >= n) return 0;
        out[at->i] = (u32)pos;
        at->next = pos + 1;
    }
    return 1;
}

static int ones_scalar(const u8 *unary, size_t bytes, size_t count, u32 *out) {
    size_t i = 0;
    for (size_t at = 0; at < bytes; at += 8) {
        u64 x = ld64(unary + at);
        if ((size_t)__builtin_popcountll(x) > count - i) return 0;
        for (; x; x &= x - 1) out[i++] = (u32)(at * 8 + (size_t)__builtin_ctzll(x));
    }
    return i == count;
}

#ifdef X86
AVX512 static inline void spread_ones(u64 x, size_t found, u32 first_bit, u32 *out) {
    __m512i places = _mm512_maskz_compress_epi8(x, iota8()), first = _mm512_set1_epi32((int)first_bit);
    _mm512_storeu_si512(out, _mm512_add_epi32(first, _mm512_cvtepu8_epi32(_mm512_castsi512_si128(places))));
    if (found > 16) {
        __m512i next = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(places, 1));
        _mm512_storeu_si512(out + 16, _mm512_add_epi32(first, next));
    }
    if (found > 32) {
        __m512i next = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(places, 2));
        _mm512_storeu_si512(out + 32, _mm512_add_epi32(first, next));
        next = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(places, 3));
        _mm512_storeu_si512(out + 48, _mm512_add_epi32(first, next));
    }
}

AVX512 static int ones_avx512(const u8 *unary, size_t bytes, size_t count, u32 *out) {
    size_t i = 0;
    for (size_t at = 0; at < bytes; at += 8) {
        u64 x = ld64(unary + at);
        size_t found = (size_t)__builtin_popcountll(x);
        if (found > count - i) return 0;
        spread_ones(x, found, (u32)(at * 8), out + i);
        i += found;
    }
    return i == count;
}

/* Appends the next ones to `out` until it has `enough`; `out` has room for SLACK more. */
typedef struct { const u8 *bits; size_t bytes, at; } Words;
AVX512 static size_t ones_until(Words *words, u32 *out, size_t held, size_t enough) {
    for (; held < enough && words->at < words->bytes; words->at += 8) {
        u64 x = ld64(words->bits + words->at);
        size_t found = (size_t)__builtin_popcountll(x);
        spread_ones(x, found, (u32)(words->at * 8), out + held);
        held += found;
    }
    return held;
}

/* Sixteen fields of k bits at a time: they start at a byte boundary. */
typedef struct { __m512i bytes, shift, mask; } Fields;
AVX512 static inline Fields fields_of(int k) {
    __m512i bit = _mm512_mullo_epi32(iota32(), _mm512_set1_epi32(k));
    /* Lane j takes bytes first .. first + 3, first = j * k / 8. */
    __m512i bytes = _mm512_mullo_epi32(_mm512_srli_epi32(bit, 3), _mm512_set1_epi32(0x01010101));
    return (Fields){_mm512_add_epi32(bytes, _mm512_set1_epi32(0x03020100)), _mm512_and_si512(bit, _mm512_set1_epi32(7)),
                    _mm512_set1_epi32((1 << k) - 1)};
}
AVX512 static inline __m512i fields_at(const Fields *f, const u8 *p) {
    __m512i raw = _mm512_permutexvar_epi8(f->bytes, _mm512_loadu_si512(p));
    return _mm512_and_si512(_mm512_srlv_epi32(raw, f->shift), f->mask);
}

AVX512 static int rice_blocks_avx512(const u8 *low, size_t low_bytes, size_t count, int k, u64 n, u32 *out, Place *at) {
    const Fields fields = fields_of(k);
    const __m512i index = iota32(), zero = _mm512_setzero_si512();
    for (; at->i + 16 <= count; at->i += 16) {
        size_t from = at->i / 16 * 2 * (size_t)k;
        if (k && from + 64 > low_bytes) break;
        __m512i sum = zero;
        if (k) {
            sum = fields_at(&fields, low + from);
            sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 15));
            sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 14));
            sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 12));
            sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 8));
        }
        u32 last_one = out[at->i + 15];
        __m512i high = _mm512_sub_epi32(_mm512_loadu_si512(out + at->i), _mm512_set1_epi32((int)at->ended));
        high = _mm512_slli_epi32(_mm512_sub_epi32(high, index), (unsigned)k);
        __m512i pos = _mm512_add_epi32(_mm512_add_epi32(high, sum), _mm512_add_epi32(index, _mm512_set1_epi32((int)at->next)));
        u32 last_sum = (u32)_mm_extract_epi32(_mm512_extracti32x4_epi32(sum, 3), 3);
        u64 last = at->next + ((last_one - at->ended - 15) << k) + last_sum + 15;
        /* Positions ascend, so no lane wrapped if the last one, computed in 64 bits, is in range. */
        if (last >= n) return 0;
        _mm512_storeu_si512(out + at->i, pos);
        at->next = last + 1;
        at->ended = (u64)last_one + 1;
    }
    return 1;
}
#endif

/* All ones of a unary code, which ends with the word of the last one. */
static int unary_ones(const u8 *unary, size_t bytes, size_t count, u32 *out) {
#ifdef X86
    if (level >= 2) {
        if (!ones_avx512(unary, bytes, count, out)) return 0;
    } else
#endif
        if (!ones_scalar(unary, bytes, count, out)) return 0;
    return bytes == (count ? padded((u64)out[count - 1] + 1) : 0);
}

static int rice_decode(const u8 *low, size_t low_bytes, const u8 *unary, size_t bytes, size_t count, int k, u64 n, u32 *out) {
    Place at = {0, 0, 0};
    if (!unary_ones(unary, bytes, count, out)) return 0;
#ifdef X86
    if (level >= 2 && !rice_blocks_avx512(low, low_bytes, count, k, n, out, &at)) return 0;
#endif
    (void)low_bytes;
    return rice_tail(low, count, k, n, out, &at);
}

#ifdef X86
/* A Rice code of parameter 1 as a bitmap of n bits. Of the unary code a zero stands for two unchanged values and a one
 * for "1" or "01", as its low bit says: every bit is expanded to two, and the unneeded ones are compressed out.
 * `out` has 32 bytes more than the bitmap. */
AVX512 static int rice1_bitmap(const u8 *low, const u8 *unary, size_t bytes, size_t count, u64 n, u8 *out) {
    const u64 even = 0x5555555555555555ull, limit = padded(n) * 8 + 128;
    u64 bit = 0, word = 0, i = 0;
    for (size_t at = 0; at < bytes; at += 4) {
        u64 x = ld32(unary + at), found = (u64)__builtin_popcountll(x);
        if (found > count - i || bit + 64 > limit) return 0;
        u64 one = _pdep_u64(x, even), second = _pdep_u64(_pdep_u64(ld64(low + (i >> 3)) >> (i & 7), x), even);
        u64 needed = ~((one & ~second) << 1);
        u64 values = _pext_u64((one & ~second) | second << 1, needed), shift = bit & 63;
        u64 end = bit + (u64)__builtin_popcountll(needed), same = (u64)0 - (end >> 6 == bit >> 6);
        word |= values << shift;
        st64(out + (bit >> 6) * 8, word);
        word = (word & same) | ((values >> 1 >> (63 - shift)) & ~same);
        bit = end;
        i += found;
    }
    if (i != count || (bytes && !ld64(unary + bytes - 8))) return 0;
    size_t done = bit >> 6;
    st64(out + done * 8, word);
    for (done++; done * 8 < padded(n); done++) st64(out + done * 8, 0);
    for (size_t at = padded(n); at < done * 8; at += 8)
        if (ld64(out + at)) return 0;
    return 1;
}

AVX512 static u64 sum_of_fields(const u8 *low, size_t low_bytes, size_t count, int k) {
    const Fields fields = fields_of(k);
    u64 sum = 0;
    size_t i = 0;
    while (i + 16 <= count && i / 16 * 2 * (size_t)k + 64 <= low_bytes) {
        __m512i part = _mm512_setzero_si512();
        /* 2^8 fields of 24 bits do not overflow a lane. */
        for (int few = 0; few < 256 && i + 16 <= count && i / 16 * 2 * (size_t)k + 64 <= low_bytes; few++, i += 16)
            part = _mm512_add_epi32(part, fields_at(&fields, low + i / 16 * 2 * (size_t)k));
        sum += (u64)_mm512_reduce_add_epi64(_mm512_and_si512(part, _mm512_set1_epi64(0xffffffff)));
        sum += (u64)_mm512_reduce_add_epi64(_mm512_srli_epi64(part, 32));
    }
    for (; i < count; i++) sum += field_at(low, (u64)i * (u64)k, (unsigned)k);
    return sum;
}

/* Decode magnitudes, sixteen at a time while their fields are within 64 bytes; `out` has the positions of the ones. */
AVX512 static int golomb_blocks_avx512(const u8 *fields, size_t size, size_t count, int k, u64 limit, u32 *out, Place *at) {
    const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi32(1), seven = _mm512_set1_epi32(7);
    const __m512i bias = _mm512_set1_epi32(1 << k), most = _mm512_set1_epi32((int)limit);
    for (; at->i + 16 <= count; at->i += 16) {
        const size_t from = at->next >> 3;
        if (from + 64 > size) break;
        __m512i ones = _mm512_loadu_si512(out + at->i);
        __m512i before = _mm512_alignr_epi32(ones, _mm512_set1_epi32((int)(at->ended - 1)), 15);
        __m512i width = _mm512_add_epi32(_mm512_sub_epi32(ones, before), _mm512_set1_epi32(k - 1));
        if (_mm512_cmpgt_epu32_mask(width, _mm512_set1_epi32(25))) break;
        __m512i sum = _mm512_add_epi32(width, _mm512_alignr_epi32(width, zero, 15));
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 14));
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 12));
        sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 8));
        __m512i bit = _mm512_add_epi32(_mm512_sub_epi32(sum, width), _mm512_set1_epi32((int)(at->next & 7)));
        __m512i bytes = _mm512_mullo_epi32(_mm512_srli_epi32(bit, 3), _mm512_set1_epi32(0x01010101));
        bytes = _mm512_add_epi32(bytes, _mm512_set1_epi32(0x03020100));
        __m512i raw = _mm512_permutexvar_epi8(bytes, _mm512_loadu_si512(fields + from));
        __m512i top = _mm512_sllv_epi32(one, width);
        __m512i value = _mm512_and_si512(_mm512_srlv_epi32(raw, _mm512_and_si512(bit, seven)), _mm512_sub_epi32(top, one));
        value = _mm512_sub_epi32(_mm512_add_epi32(value, top), bias);
        if (_mm512_cmpgt_epu32_mask(value, most)) return 0;
        at->ended = (u64)out[at->i + 15] + 1;
        at->next += (u32)_mm_extract_epi32(_mm512_extracti32x4_epi32(sum, 3), 3);
        _mm512_storeu_si512(out + at->i, value);
    }
    return 1;
}
#endif

/* `fields` has `bytes` bytes and is readable up to `size`. */
static int golomb_decode(const u8 *unary, size_t unary_bytes, const u8 *fields, size_t bytes, size_t size, size_t count,
                         int k, int width, u32 *out) {
    const u64 limit = ((u64)1 << (8 * width - 1)) - 2, end = (u64)bytes * 8;
    Place at = {0, 0, 0};
    if (!unary_ones(unary, unary_bytes, count, out)) return 0;
    while (at.i < count) {
#ifdef X86
        if (level >= 2 && !golomb_blocks_avx512(fields, size, count, k, limit, out, &at)) return 0;
#endif
        for (size_t few = 0; few < 16 && at.i < count; few++, at.i++) {
            u64 bits = out[at.i] - at.ended + (u64)k;
            at.ended = (u64)out[at.i] + 1;
            if (bits > MAX_FIELD || at.next + bits > end) return 0;
            u64 magnitude = ((u64)1 << bits) + field_at(fields, at.next, (unsigned)bits) - ((u64)1 << k);
            at.next += bits;
            if (magnitude > limit) return 0;
            out[at.i] = (u32)magnitude;
        }
    }
    (void)size;
    return padded(at.next) == bytes;
}

/* ---- split and join: signs, and steps beyond 1 ---- */

static size_t split_from(const u8 *steps, size_t from, size_t m, int width, u8 *signs, u32 *escapes, u32 *mags, size_t e) {
    for (size_t i = from; i < m; i++) {
        int32_t s = width == 2 ? (int16_t)ld16(steps + 2 * i) : (int32_t)ld32(steps + 4 * i);
        u32 magnitude = s < 0 ? 0u - (u32)s : (u32)s;
        signs[i >> 3] |= (u8)((s < 0) << (i & 7));
        escapes[e] = (u32)i;
        mags[e] = magnitude - 2;
        e += magnitude > 1;
    }
    return e;
}

static inline void lengthen(u8 *steps, size_t i, u32 magnitude, int width) {
    if (width == 2) st16(steps + 2 * i, (u16)(ld16(steps + 2 * i) * (magnitude + 2)));
    else st32(steps + 4 * i, ld32(steps + 4 * i) * (magnitude + 2));
}

static void join_signs(u8 *steps, size_t from, size_t m, int width, const u8 *signs) {
    for (size_t i = from; i < m; i++) {
        int s = 1 - 2 * ((signs[i >> 3] >> (i & 7)) & 1);
        if (width == 2) st16(steps + 2 * i, (u16)s);
        else st32(steps + 4 * i, (u32)s);
    }
}

#ifdef X86
AVX512 static size_t split16_avx512(const u8 *steps, size_t m, u8 *signs, u32 *escapes, u32 *mags) {
    const __m512i one = _mm512_set1_epi16(1), two = _mm512_set1_epi16(2), index = iota16();
    size_t e = 0, i = 0;
    for (; i + 32 <= m; i += 32) {
        __m512i s = _mm512_loadu_si512(steps + 2 * i), size = _mm512_abs_epi16(s);
        st32(signs + i / 8, (u32)_mm512_movepi16_mask(s));
        __mmask32 beyond = _mm512_cmpneq_epi16_mask(size, one);
        if (!beyond) continue;
        __m512i place = _mm512_maskz_compress_epi16(beyond, index);
        size = _mm512_maskz_compress_epi16(beyond, _mm512_sub_epi16(size, two));
        __m512i first = _mm512_set1_epi32((int)i);
        _mm512_storeu_si512(escapes + e, _mm512_add_epi32(first, lower16_of16(place)));
        _mm512_storeu_si512(mags + e, lower16_of16(size));
        unsigned found = (unsigned)__builtin_popcount(beyond);
        if (found > 16) {
            _mm512_storeu_si512(escapes + e + 16, _mm512_add_epi32(first, upper16_of16(place)));
            _mm512_storeu_si512(mags + e + 16, upper16_of16(size));
        }
        e += found;
    }
    return split_from(steps, i, m, 2, signs, escapes, mags, e);
}

AVX512 static void join16_avx512(u8 *steps, size_t m, const u8 *signs) {
    const __m512i one = _mm512_set1_epi16(1), minus = _mm512_set1_epi16(-1);
    size_t i = 0;
    for (; i + 32 <= m; i += 32)
        _mm512_storeu_si512(steps + 2 * i, _mm512_mask_blend_epi16(ld32(signs + i / 8), one, minus));
    join_signs(steps, i, m, 2, signs);
}
#endif

#ifdef X86
/* Adds steps at the positions of a Rice code, block by block, so that decoded data stays in the L1 and L2 caches.
 * The whole code is validated first. Escapes ascend and are below `count`. */
AVX512 static int add_rice_avx512(u8 *w, u64 n, const u8 *low, size_t low_bytes, const u8 *unary, size_t bytes, size_t count,
                                  int k, const u8 *signs, const u32 *escapes, const u32 *mags, size_t e, int width) {
    u64 ones = 0;
    for (size_t at = 0; at < bytes; at += 8) ones += (u64)__builtin_popcountll(ld64(unary + at));
    if (ones != count || (bytes != 0) != (count != 0)) return 0;
    if (!count) return 1;
    u64 end = ld64(unary + bytes - 8);
    if (!end) return 0;
    u64 last = (u64)bytes * 8 - 1 - (u64)__builtin_clzll(end) - (count - 1);
    if ((last << k) + (k ? sum_of_fields(low, low_bytes, count, k) : 0) + count - 1 >= n) return 0;

    u32 pos[BLOCK + 2 * SLACK];
    u8 steps[BLOCK * 4];
    Words words = {unary, bytes, 0};
    Place at = {0, 0, 0};
    for (size_t i = 0, held = 0, j = 0; i < count; i += BLOCK) {
        size_t take = count - i < BLOCK ? count - i : BLOCK;
        held = ones_until(&words, pos, held, take) - take;
        at.i = 0;
        rice_blocks_avx512(low, low_bytes, take, k, n, pos, &at);
        rice_tail(low, take, k, n, pos, &at);
        low += BLOCK / 8 * (size_t)k;
        low_bytes -= BLOCK / 8 * (size_t)k;
        if (width == 2) join16_avx512(steps, take, signs + i / 8);
        else join_signs(steps, 0, take, 4, signs + i / 8);
        for (; j < e && escapes[j] < i + take; j++) lengthen(steps, escapes[j] - i, mags[j], width);
        add_at(w, pos, steps, take, width);
        memmove(pos, pos + take, held * 4);
    }
    return 1;
}
#endif

static size_t merge(const u32 *p, const u8 *s, size_t np, const u32 *q, const u8 *t, size_t nq, int width, u32 *pos, u8 *out) {
    size_t i = 0, j = 0, m = 0;
    while (i < np || j < nq) {
        int first = j == nq || (i < np && p[i] <= q[j]), second = i == np || (j < nq && q[j] <= p[i]);
        u32 at = first ? p[i] : q[j], step = 0;
        if (first) step += width == 2 ? ld16(s + 2 * i) : ld32(s + 4 * i);
        if (second) step += width == 2 ? ld16(t + 2 * j) : ld32(t + 4 * j);
        i += (size_t)first;
        j += (size_t)second;
        pos[m] = at;
        if (width == 2) { st16(out + 2 * m, (u16)step); m += (u16)step != 0; }
        else { st32(out + 4 * m, step); m += step != 0; }
    }
    return m;
}

static int best_level(void) {
#ifdef X86
    __builtin_cpu_init();
    int bits = __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    if (bits && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"))
        return 2;
    if (bits && __builtin_cpu_supports("avx2")) return 1;
#endif
    return 0;
}

/* ---- Python functions: buffers in, buffers out; return a length or None ---- */

typedef struct { Py_buffer b[8]; int n; } Held;
static void release(Held *h) { while (h->n) PyBuffer_Release(&h->b[--h->n]); }
static PyObject *refuse(Held *h, const char *why) {
    release(h);
    PyErr_SetString(PyExc_ValueError, why);
    return NULL;
}
static PyObject *answer(Held *h, int good, size_t value) {
    release(h);
    if (!good) Py_RETURN_NONE;
    return PyLong_FromSize_t(value);
}
static int is_width(int width) { return width == 2 || width == 4; }

static PyObject *py_diff(PyObject *self, PyObject *args) {
    Held h = {.n = 4};
    int width;
    if (!PyArg_ParseTuple(args, "y*y*iw*w*", &h.b[0], &h.b[1], &width, &h.b[2], &h.b[3])) return NULL;
    size_t n = is_width(width) ? (size_t)h.b[0].len / (size_t)width : 0, m;
    if (!is_width(width) || h.b[1].len != h.b[0].len || n > (size_t)MAX_VALUES ||
        (size_t)h.b[2].len < (n + SLACK) * 4 || (size_t)h.b[3].len < (n + SLACK) * (size_t)width)
        return refuse(&h, "diff: buffers of the wrong size");
    const u8 *a = h.b[0].buf, *b = h.b[1].buf;
    Py_BEGIN_ALLOW_THREADS
#ifdef X86
    if (level >= 2) m = diff_avx512(a, b, n, width, h.b[2].buf, h.b[3].buf);
    else if (level == 1) m = diff_avx2(a, b, n, width, h.b[2].buf, h.b[3].buf);
    else
#endif
        m = diff_from(a, b, 0, n, width, 0, h.b[2].buf, h.b[3].buf);
    Py_END_ALLOW_THREADS
    return answer(&h, 1, m);
}

static PyObject *py_add(PyObject *self, PyObject *args) {
    Held h = {.n = 3};
    int width;
    if (!PyArg_ParseTuple(args, "w*y*y*i", &h.b[0], &h.b[1], &h.b[2], &width)) return NULL;
    size_t m = (size_t)h.b[1].len / 4, n = is_width(width) ? (size_t)h.b[0].len / (size_t)width : 0;
    if (!is_width(width) || (size_t)h.b[2].len < m * (size_t)width) return refuse(&h, "add: buffers of the wrong size");
    const u32 *pos = h.b[1].buf;
    u32 last = 0;
    Py_BEGIN_ALLOW_THREADS
#ifdef X86
    if (level >= 2) last = largest_avx512(pos, m);
    else
#endif
        last = largest(pos, m);
    if (!m || last < n) add_at(h.b[0].buf, pos, h.b[2].buf, m, width);
    Py_END_ALLOW_THREADS
    if (m && last >= n) return refuse(&h, "add: a position outside the target");
    return answer(&h, 1, m);
}

static PyObject *py_add_bitmap(PyObject *self, PyObject *args) {
    Held h = {.n = 3};
    Py_ssize_t count;
    int width, good;
    if (!PyArg_ParseTuple(args, "w*y*y*ni", &h.b[0], &h.b[1], &h.b[2], &count, &width)) return NULL;
    size_t n = is_width(width) ? (size_t)h.b[0].len / (size_t)width : 0, bytes = (size_t)h.b[1].len;
    if (!is_width(width) || bytes != padded(n) || count < 0 ||
        (size_t)h.b[2].len < ((size_t)count + SLACK) * (size_t)width)
        return refuse(&h, "add_bitmap: buffers of the wrong size");
    const u8 *bits = h.b[1].buf;
    Py_BEGIN_ALLOW_THREADS
    u64 ones = 0;
    for (size_t at = 0; at < bytes; at += 8) ones += (u64)__builtin_popcountll(ld64(bits + at));
    good = ones == (u64)count && (n % 64 == 0 || ld64(bits + bytes - 8) >> (n % 64) == 0);
    if (good) {
#ifdef X86
        if (level >= 2 && width == 2) add_marked_avx512(h.b[0].buf, n, bits, bytes, h.b[2].buf);
        else
#endif
            add_marked(h.b[0].buf, 0, bits, bytes, h.b[2].buf, width);
    }
    Py_END_ALLOW_THREADS
    return answer(&h, good, (size_t)count);
}

static PyObject *py_rice_pack(PyObject *self, PyObject *args) {
    Held h = {.n = 3};
    int k;
    if (!PyArg_ParseTuple(args, "y*iw*w*", &h.b[0], &k, &h.b[1], &h.b[2])) return NULL;
    size_t m = (size_t)h.b[0].len / 4, bytes;
    if (k < 0 || k > MAX_K || (size_t)h.b[1].len < padded((u64)m * (u64)k) + 16)
        return refuse(&h, "rice_pack: buffers of the wrong size");
    const u32 *pos = h.b[0].buf;
    Unary u = {h.b[2].buf, (size_t)h.b[2].len, 0, 0, 0, 0};
    Py_BEGIN_ALLOW_THREADS
    if (k) pack_low(pos, m, k, h.b[1].buf);
    u = pack_high(pos, m, k, u);
    bytes = (size_t)padded(u.bit);
    Py_END_ALLOW_THREADS
    if (u.full) return refuse(&h, "rice_pack: positions that do not ascend, or a buffer of the wrong size");
    return answer(&h, 1, bytes);
}

static PyObject *py_rice_unpack(PyObject *self, PyObject *args) {
    Held h = {.n = 3};
    Py_ssize_t count, n;
    int k, good;
    if (!PyArg_ParseTuple(args, "y*y*ninw*", &h.b[0], &h.b[1], &count, &k, &n, &h.b[2])) return NULL;
    size_t low = (size_t)h.b[0].len, unary = (size_t)h.b[1].len;
    if (count < 0 || n < 0 || n > (Py_ssize_t)MAX_VALUES || count > n || k < 0 || k > MAX_K || unary % 8 ||
        (size_t)h.b[2].len < ((size_t)count + SLACK) * 4 ||
        (k && count && low < ((u64)count * (u64)k + 7) / 8 + 8))
        return refuse(&h, "rice_unpack: buffers of the wrong size");
    if (unary >= (size_t)1 << 29) return answer(&h, 0, 0);
    Py_BEGIN_ALLOW_THREADS
    good = rice_decode(h.b[0].buf, low, h.b[1].buf, unary, (size_t)count, k, (u64)n, h.b[2].buf);
    Py_END_ALLOW_THREADS
    return answer(&h, good, (size_t)count);
}

static PyObject *py_add_payload(PyObject *self, PyObject *args) {
    enum { LOW, HIGH, SIGNS, ESCAPES_LOW, ESCAPES_HIGH, LENGTHS, MAGNITUDES, SECTIONS };
    Held h = {.n = 2};
    int k, ek, mk, width, good = 0;
    unsigned count, e, bytes[SECTIONS];
    if (!PyArg_ParseTuple(args, "w*y*IiiiiIIIII", &h.b[0], &h.b[1], &count, &width, &k, &ek, &mk, &bytes[HIGH], &e,
                          &bytes[ESCAPES_HIGH], &bytes[LENGTHS], &bytes[MAGNITUDES])) return NULL;
    size_t n = is_width(width) ? (size_t)h.b[0].len / (size_t)width : 0, size = (size_t)h.b[1].len, end = PARAMS_BYTES;
    if (!is_width(width) || n > (size_t)MAX_VALUES || count > n || e > count || k < 0 || k > MAX_K || ek < 0 || ek > MAX_K ||
        mk < 0 || mk >= MAX_FIELD)
        return refuse(&h, "add_payload: numbers beyond their range");
    const u64 lengths[SECTIONS] = {padded((u64)count * (u64)k), bytes[HIGH], padded(count), padded((u64)e * (u64)ek),
                                   bytes[ESCAPES_HIGH], bytes[LENGTHS], bytes[MAGNITUDES]};
    const u8 *payload = h.b[1].buf, *sections[SECTIONS];
    for (int i = 0; i < SECTIONS; i++) {
        sections[i] = payload + end;
        if (lengths[i] % 8 || lengths[i] >= (u64)1 << 32 || end + lengths[i] + 8 > size)
            return refuse(&h, "add_payload: sections beyond the payload");
        end += (size_t)lengths[i];
    }
    if (bytes[HIGH] >= 1u << 29 || bytes[ESCAPES_HIGH] >= 1u << 29 || bytes[LENGTHS] >= 1u << 29) return answer(&h, 0, 0);
#ifdef X86
    if (best_level() < 2) return refuse(&h, "add_payload: this processor does not have it");
    u32 *escapes = PyMem_Malloc(2 * ((size_t)e + SLACK) * 4);
    if (!escapes) { release(&h); return PyErr_NoMemory(); }
    u32 *mags = escapes + e + SLACK;
    const u8 *past = payload + size;
    Py_BEGIN_ALLOW_THREADS
    good = rice_decode(sections[ESCAPES_LOW], (size_t)(past - sections[ESCAPES_LOW]), sections[ESCAPES_HIGH],
                       bytes[ESCAPES_HIGH], e, ek, count, escapes) &&
           golomb_decode(sections[LENGTHS], bytes[LENGTHS], sections[MAGNITUDES], bytes[MAGNITUDES],
                         (size_t)(past - sections[MAGNITUDES]), e, mk, width, mags) &&
           add_rice_avx512(h.b[0].buf, n, sections[LOW], (size_t)(past - sections[LOW]), sections[HIGH], bytes[HIGH], count,
                           k, sections[SIGNS], escapes, mags, e, width);
    Py_END_ALLOW_THREADS
    PyMem_Free(escapes);
#else
    (void)sections;
#endif
    return answer(&h, good, count);
}

static PyObject *py_bitmap_pack(PyObject *self, PyObject *args) {
    Held h = {.n = 2};
    if (!PyArg_ParseTuple(args, "y*w*", &h.b[0], &h.b[1])) return NULL;
    size_t m = (size_t)h.b[0].len / 4;
    const u32 *pos = h.b[0].buf;
    u8 *bits = h.b[1].buf;
    u64 n = (u64)h.b[1].len * 8;
    int good = 1;
    Py_BEGIN_ALLOW_THREADS
    memset(bits, 0, (size_t)h.b[1].len);
    for (size_t i = 0; i < m && good; i++) {
        good = pos[i] < n;
        if (good) bits[pos[i] >> 3] |= (u8)(1 << (pos[i] & 7));
    }
    Py_END_ALLOW_THREADS
    if (!good) return refuse(&h, "bitmap_pack: a position outside the bitmap");
    return answer(&h, 1, m);
}

static PyObject *py_bitmap_unpack(PyObject *self, PyObject *args) {
    Held h = {.n = 2};
    Py_ssize_t count, n;
    int good;
    if (!PyArg_ParseTuple(args, "y*nnw*", &h.b[0], &count, &n, &h.b[1])) return NULL;
    size_t bytes = (size_t)h.b[0].len;
    if (count < 0 || n < 0 || n > (Py_ssize_t)MAX_VALUES || bytes != padded((u64)n) ||
        (size_t)h.b[1].len < ((size_t)count + SLACK) * 4)
        return refuse(&h, "bitmap_unpack: buffers of the wrong size");
    const u8 *bits = h.b[0].buf;
    u32 *out = h.b[1].buf;
    Py_BEGIN_ALLOW_THREADS
#ifdef X86
    if (level >= 2) good = ones_avx512(bits, bytes, (size_t)count, out);
    else
#endif
        good = ones_scalar(bits, bytes, (size_t)count, out);
    good = good && (!count || out[count - 1] < (u64)n);
    Py_END_ALLOW_THREADS
    return answer(&h, good, (size_t)count);
}

static PyObject *py_split(PyObject *self, PyObject *args) {
    Held h = {.n = 4};
    int width;
    if (!PyArg_ParseTuple(args, "y*iw*w*w*", &h.b[0], &width, &h.b[1], &h.b[2], &h.b[3])) return NULL;
    size_t m = is_width(width) ? (size_t)h.b[0].len / (size_t)width : 0, e;
    if (!is_width(width) || (size_t)h.b[1].len != padded(m) || (size_t)h.b[2].len < (m + SLACK) * 4 ||
        (size_t)h.b[3].len < (m + SLACK) * 4)
        return refuse(&h, "split: buffers of the wrong size");
    Py_BEGIN_ALLOW_THREADS
    memset(h.b[1].buf, 0, (size_t)h.b[1].len);
#ifdef X86
    if (level >= 2 && width == 2) e = split16_avx512(h.b[0].buf, m, h.b[1].buf, h.b[2].buf, h.b[3].buf);
    else
#endif
        e = split_from(h.b[0].buf, 0, m, width, h.b[1].buf, h.b[2].buf, h.b[3].buf, 0);
    Py_END_ALLOW_THREADS
    return answer(&h, 1, e);
}

static PyObject *py_join(PyObject *self, PyObject *args) {
    Held h = {.n = 4};
    int width;
    if (!PyArg_ParseTuple(args, "y*y*y*iw*", &h.b[0], &h.b[1], &h.b[2], &width, &h.b[3])) return NULL;
    size_t e = (size_t)h.b[1].len / 4;
    size_t m = is_width(width) && (size_t)h.b[3].len >= SLACK * (size_t)width ? (size_t)h.b[3].len / (size_t)width - SLACK : 0;
    if (!is_width(width) || (size_t)h.b[0].len < (m + 7) / 8 || (size_t)h.b[2].len < e * 4)
        return refuse(&h, "join: buffers of the wrong size");
    const u32 *escapes = h.b[1].buf, *mags = h.b[2].buf;
    u8 *steps = h.b[3].buf;
    int good = 1;
    Py_BEGIN_ALLOW_THREADS
#ifdef X86
    if (level >= 2 && width == 2) join16_avx512(steps, m, h.b[0].buf);
    else
#endif
        join_signs(steps, 0, m, width, h.b[0].buf);
    for (size_t j = 0; j < e && good; j++) {
        good = escapes[j] < m;
        if (good) lengthen(steps, escapes[j], mags[j], width);
    }
    Py_END_ALLOW_THREADS
    if (!good) return refuse(&h, "join: an escape outside the steps");
    return answer(&h, 1, m);
}

static PyObject *py_golomb_pack(PyObject *self, PyObject *args) {
    Held h = {.n = 3};
    int k;
    if (!PyArg_ParseTuple(args, "y*iw*w*", &h.b[0], &k, &h.b[1], &h.b[2])) return NULL;
    size_t e = (size_t)h.b[0].len / 4, unary_bytes, bytes;
    if (k < 0 || k >= MAX_FIELD || (size_t)h.b[2].len < e * 4 + 24)
        return refuse(&h, "golomb_pack: buffers of the wrong size");
    const u32 *mags = h.b[0].buf;
    Unary u = {h.b[1].buf, (size_t)h.b[1].len, 0, 0, 0, 0};
    Py_BEGIN_ALLOW_THREADS
    Writer w = {h.b[2].buf, 0, 0};
    memset(u.out, 0, u.size);
    for (size_t j = 0; j < e && !u.full; j++) {
        u32 shifted = (mags[j] & 0x7fffffffu) + ((u32)1 << k);
        unsigned width = 31u - (unsigned)__builtin_clz(shifted);
        put_unary(&u, width - (unsigned)k);
        put(&w, shifted - ((u32)1 << width), width);
    }
    unary_bytes = (size_t)padded(u.bit);
    bytes = finish(&w, h.b[2].buf);
    Py_END_ALLOW_THREADS
    if (u.full) return refuse(&h, "golomb_pack: buffers of the wrong size");
    release(&h);
    return Py_BuildValue("nn", (Py_ssize_t)unary_bytes, (Py_ssize_t)bytes);
}

static PyObject *py_golomb_unpack(PyObject *self, PyObject *args) {
    Held h = {.n = 3};
    Py_ssize_t fields_bytes, count;
    int k, width, good;
    if (!PyArg_ParseTuple(args, "y*y*nniiw*", &h.b[0], &h.b[1], &fields_bytes, &count, &k, &width, &h.b[2])) return NULL;
    size_t unary = (size_t)h.b[0].len;
    if (!is_width(width) || count < 0 || k < 0 || k >= MAX_FIELD || unary % 8 || fields_bytes < 0 ||
        h.b[1].len < fields_bytes + 8 || (size_t)h.b[2].len < ((size_t)count + SLACK) * 4)
        return refuse(&h, "golomb_unpack: buffers of the wrong size");
    if (unary >= (size_t)1 << 29) return answer(&h, 0, 0);
    Py_BEGIN_ALLOW_THREADS
    good = golomb_decode(h.b[0].buf, unary, h.b[1].buf, (size_t)fields_bytes, (size_t)h.b[1].len, (size_t)count, k, width,
                         h.b[2].buf);
    Py_END_ALLOW_THREADS
    return answer(&h, good, (size_t)count);
}

static PyObject *py_rice1_bitmap(PyObject *self, PyObject *args) {
    Held h = {.n = 3};
    Py_ssize_t count, n;
    int good = 0;
    if (!PyArg_ParseTuple(args, "y*y*nnw*", &h.b[0], &h.b[1], &count, &n, &h.b[2])) return NULL;
    size_t unary = (size_t)h.b[1].len;
    if (count < 0 || n < 0 || n > (Py_ssize_t)MAX_VALUES || count > n || unary % 8 ||
        (size_t)h.b[2].len < padded((u64)n) + 32 || (size_t)h.b[0].len < ((size_t)count + 7) / 8 + 8)
        return refuse(&h, "rice1_bitmap: buffers of the wrong size");
#ifdef X86
    if (best_level() < 2) return refuse(&h, "rice1_bitmap: this processor does not have it");
    Py_BEGIN_ALLOW_THREADS
    good = rice1_bitmap(h.b[0].buf, h.b[1].buf, unary, (size_t)count, (u64)n, h.b[2].buf);
    Py_END_ALLOW_THREADS
#endif
    return answer(&h, good, (size_t)count);
}

static PyObject *py_merge(PyObject *self, PyObject *args) {
    Held h = {.n = 6};
    int width;
    if (!PyArg_ParseTuple(args, "y*y*y*y*iw*w*", &h.b[0], &h.b[1], &h.b[2], &h.b[3], &width, &h.b[4], &h.b[5])) return NULL;
    size_t p = (size_t)h.b[0].len / 4, q = (size_t)h.b[2].len / 4, m;
    if (!is_width(width) || (size_t)h.b[1].len < p * (size_t)width || (size_t)h.b[3].len < q * (size_t)width ||
        (size_t)h.b[4].len < (p + q + SLACK) * 4 || (size_t)h.b[5].len < (p + q + SLACK) * (size_t)width)
        return refuse(&h, "merge: buffers of the wrong size");
    Py_BEGIN_ALLOW_THREADS
    m = merge(h.b[0].buf, h.b[1].buf, p, h.b[2].buf, h.b[3].buf, q, width, h.b[4].buf, h.b[5].buf);
    Py_END_ALLOW_THREADS
    return answer(&h, 1, m);
}

static PyObject *py_best_level(PyObject *self, PyObject *none) { return PyLong_FromLong(best_level()); }

static PyObject *py_use_level(PyObject *self, PyObject *arg) {
    long requested = PyLong_AsLong(arg);
    if (requested == -1 && PyErr_Occurred()) return NULL;
    if (requested < 0 || requested > best_level()) {
        PyErr_SetString(PyExc_ValueError, "use_level: this processor does not have it");
        return NULL;
    }
    level = (int)requested;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"diff", py_diff, METH_VARARGS, NULL},
    {"add", py_add, METH_VARARGS, NULL},
    {"add_payload", py_add_payload, METH_VARARGS, NULL},
    {"add_bitmap", py_add_bitmap, METH_VARARGS, NULL},
    {"rice_pack", py_rice_pack, METH_VARARGS, NULL},
    {"rice_unpack", py_rice_unpack, METH_VARARGS, NULL},
    {"rice1_bitmap", py_rice1_bitmap, METH_VARARGS, NULL},
    {"bitmap_pack", py_bitmap_pack, METH_VARARGS, NULL},
    {"bitmap_unpack", py_bitmap_unpack, METH_VARARGS, NULL},
    {"split", py_split, METH_VARARGS, NULL},
    {"join", py_join, METH_VARARGS, NULL},
    {"golomb_pack", py_golomb_pack, METH_VARARGS, NULL},
    {"golomb_unpack", py_golomb_unpack, METH_VARARGS, NULL},
    {"merge", py_merge, METH_VARARGS, NULL},
    {"best_level", py_best_level, METH_NOARGS, NULL},
    {"use_level", py_use_level, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
