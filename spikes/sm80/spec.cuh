// SPDX-License-Identifier: Apache-2.0
// What a kernel is compiled for (Spec, a class-type template argument) and what it is called with (Args).
namespace fovea {

enum class Bias : int { none, tile, element };  // tile: rows of 16-byte alignment, through shared memory; element: any stride, straight from global

struct Spec {
    int arch = 80;
    Type type = Type::bf16;
    int d = 64;                  // head dimension, a multiple of 16
    int warps = 4;
    int tiles = 2;               // row tiles of 16 a warp: queries in the forward, keys in the backward
    int step = 64;               // what the loop advances by: keys in the forward, queries in the backward
    int part = 64;               // backward: queries whose S and dP lie in registers at a time
    int ctas = 2;                // CTAs an SM that registers are limited for
    int stages = 2;
    bool q_registers = false;    // forward: Q fragments stay in registers
    bool lazy = false;           // forward: O is rescaled only when a maximum moves by more than 2^8
    bool ones = false;           // forward: row sums by the tensor cores (P times a column of ones)
    bool dq = true;              // backward: dQ too; otherwise backward_dq makes it
    bool delay = false;          // backward: dQ of a step is computed in the next (one barrier a step)
    bool causal = false;         // any band in `forward`, a causal one elsewhere
    Bias bias = Bias::none;
    bool dropout = false;
    bool early = false;          // forward: random words are made before S, so that they can overlap its products
    bool store_ds = false;       // backward: dbias of full size, stored as it arises (zero before the call where a mask skips tiles)
    int split_q = 2;             // backward: warps along the queries in dQ
    int split_k = 4;             // wide backward: warps along the keys in S (tiles * 16 keys each)
    int split_o = 4;             // wide backward: warps along the keys in dV and dK
};

struct Strides { i64 b, h, s; };  // in elements; the last dimension is contiguous

struct Args {
    const u16 *q, *k, *v, *o, *d_o;
    u16 *out, *dk, *dv;
    Strides qs, ks, vs, os, dos, outs, dks, dvs;
    const u16* bias;
    Strides biases;              // bias of (b, h, query, key): the last with stride bias_k
    i64 bias_k;
    float* lse;                  // b, h, sq
    float *lse_pad, *delta_pad;  // backward workspace: b, h, rows padded to 64; lse * log2(e) (or natural, with a bias) and delta
    float* dq_sum;               // backward workspace: b, h, padded rows, d in fp32, in register order
    u16* dq;
    Strides dqs;
    u16* dbias;                  // bias gradient kernel
    float* dbias_sum;            // its partial sums where the list is split
    int batch, heads, heads_k, sq, sk, sq_pad;
    int list, chunks;            // bias gradient: entries that share a plane, and the number of pieces they are cut into
    float scale;
    u32 drop;                    // T of the dropout rule, 0 ... 65535
    float keep_scale;
    u64 seed, offset;
    u16 *qx, *kx, *vx, *dox;     // fp32 as pairs of fp16: b, h, s, 2 d (high parts, then low parts), scaled by a power of two per (b, h)
    int low, high;               // the band of math/band.h: query i meets the keys i + low ... i + high
    u32* sizes;                  // 6 x (b, h): largest |q|, |k|, |v|, |do|, row norm of v, of do; bits of a float
};

}  // namespace fovea
