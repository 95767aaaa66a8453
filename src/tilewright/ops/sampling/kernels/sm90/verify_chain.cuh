// The accepted drafts of each request and the token after them, in one launch: a cluster of blocks takes a request.
//
// Every block counts the accepted drafts by itself.  Then the cluster reads one row of the target and one of the draft into
// shared memory, sums what is left of the target, max(p - q, 0), or the target where nothing is, and draws.
//
// Config: kThreads, kRowOffset, kCertain (no probabilities of drafts: they are one).
#pragma once
#include "sample_parts/exchange.cuh"
#include "sample_parts/numbers.cuh"
#include "sample_parts/part.cuh"
#include "sample_parts/resident_row.cuh"

namespace tilewright {

// At the start of a block's shared memory; its parts of the rows follow at kRowOffset.
template <u32 kThreads> struct VerifyMemory {
    Barrier loaded[4], loaded_draft[4];
    Exchange<2>::Memory exchange;
    u64 masses[kThreads / 32], residuals[kThreads / 32];
    int accepted;
};

// A probability as a multiple of 2^-40, rounded down: the bits of a float, shifted by its exponent.  NaN is 0.
__device__ inline u64 fixed_of(float p) {
    const u32 bits = __float_as_uint(fminf(fmaxf(p, 0.0f), 1.0f)), exponent = bits >> 23;
    return (u64((bits & 0x7fffff) | 0x800000) << 17) >> min(127 - exponent, 63u);
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads)
    verify_chain(i64* tokens, int* accepted, const float* p, const float* q, const i64* drafts, const i64* seeds,
                 const i64* positions, int vocabulary, int n, int part_vectors) {
    constexpr u32 kThreads = Config::kThreads, kWarps = kThreads / 32;
    constexpr bool kCertain = Config::kCertain;
    using Memory = VerifyMemory<kThreads>;
    using Row = ResidentRow<float, kThreads>;
    static_assert(sizeof(Memory) <= Config::kRowOffset, "the rows begin after it");
    Memory& shared = *reinterpret_cast<Memory*>(dynamic_shared());
    const u32 rank = cluster_rank(), blocks = cluster_blocks(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 b = blockIdx.x / blocks;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 4; ++i) shared.loaded[i].init(1), shared.loaded_draft[i].init(1);
        for (u32 i = 0; i < 2; ++i) shared.exchange.received[i].init(1);
        fence_barrier_init();
    }
    cluster_arrive_relaxed();
    __syncthreads();
    griddepcontrol_wait();
    launch_dependents();
    const u64 seed = u64(seeds[b]), position = u64(positions[b]);
    const i64* const own_drafts = drafts + b * n;
    const float* const p_rows = p + b * (n + 1) * vocabulary;
    const float* const q_rows = q + b * n * vocabulary;
    const auto is_token = [&](i64 token) { return token >= 0 && token < vocabulary; };

    // The accepted drafts: a lane judges each, 32 at a time
    if (warp == 0) {
        int count = 0;
        for (int first = 0; first < n && count == first; first += 32) {
            const int i = first + int(lane);
            bool accepts = false;
            if (i < n) {
                const i64 token = own_drafts[i];
                if (is_token(token)) {
                    const u64 p_token = fixed_of(p_rows[i64(i) * vocabulary + token]);
                    const u64 q_token = kCertain ? kOne : fixed_of(q_rows[i64(i) * vocabulary + token]);
                    accepts = random_below(random_of(seed, position + i, 1), q_token) < p_token;
                }
            }
            const u32 rejected = ~__ballot_sync(~0u, accepts);
            count = first + (rejected ? __ffs(rejected) - 1 : 32);
        }
        if (lane == 0) shared.accepted = count;
    }
    __syncthreads();
    const int count = shared.accepted;
    const i64 draft = count < n ? own_drafts[count] : -1;
    const bool has_draft = is_token(draft) && !kCertain;

    // The two rows
    u8* const row_memory = dynamic_shared() + Config::kRowOffset;
    const Row target(reinterpret_cast<float*>(row_memory), shared.loaded, p_rows + i64(count) * vocabulary, vocabulary, rank,
                     u32(part_vectors));
    if (has_draft) {
        Row(reinterpret_cast<float*>(row_memory + 16 * part_vectors), shared.loaded_draft, q_rows + i64(count) * vocabulary,
            vocabulary, rank, u32(part_vectors));
    }
    __syncthreads();
    for (u32 stage = 0; stage < Row::kStages; ++stage) {
        target.loaded[stage].wait(0);
        if (has_draft) shared.loaded_draft[stage].wait(0);
    }
    // Element i of vector v: of the target, and what the draft leaves of it
    const auto weights_at = [&](u32 v, u64 (&masses)[4], u64 (&residuals)[4]) {
        const auto vector = target.at(v);
        const float* const of_draft = reinterpret_cast<const float*>(row_memory + 16 * part_vectors) + v * 4;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const int token = target.token(v, i);
            masses[i] = fixed_of(vector.x[i]);
            u64 taken = 0;
            if (kCertain) {
                taken = token == draft ? kOne : 0;
            } else if (has_draft) {
                taken = fixed_of(of_draft[i]);
            }
            residuals[i] = masses[i] > taken ? masses[i] - taken : 0;
        }
    };

    // Masses of warps, of blocks, of the row
    const Part part(target.vectors, kWarps, warp);
    u64 mass = 0, residual = 0;
    for (u32 v = part.begin + lane; v < part.end; v += 32) {
        u64 masses[4], residuals[4];
        weights_at(v, masses, residuals);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) mass += masses[i], residual += residuals[i];
    }
    mass = warp_sum(mass), residual = warp_sum(residual);
    if (lane == 0) shared.masses[warp] = mass, shared.residuals[warp] = residual;
    __syncthreads();
    cluster_wait();
    Exchange<2> rounds{shared.exchange, rank, blocks};
    rounds.begin(2);
    if (warp == 0) rounds.post(0, warp_sum(lane < kWarps ? shared.masses[lane] : 0));
    if (warp == 1) rounds.post(1, warp_sum(lane < kWarps ? shared.residuals[lane] : 0));
    const u64* got = rounds.wait();
    u64 all_residuals = 0;
    for (u32 i = 0; i < blocks; ++i) all_residuals += got[kMostBlocks + i];
    const bool draws_residual = all_residuals > 0;
    const u32 j = draws_residual ? 1 : 0;
    u64 total = 0, before = 0;
    for (u32 i = 0; i < blocks; ++i) total += got[j * kMostBlocks + i], before += i < rank ? got[j * kMostBlocks + i] : 0;
    for (u32 w = 0; w < warp; ++w) before += draws_residual ? shared.residuals[w] : shared.masses[w];

    // The results
    i64* const own_tokens = tokens + b * (n + 1);
    if (rank == 0) {
        for (int i = int(threadIdx.x); i <= n; i += kThreads) {
            if (i != count) own_tokens[i] = i < count ? own_drafts[i] : -1;
        }
        if (threadIdx.x == 0) {
            accepted[b] = count;
            if (total == 0) own_tokens[count] = -1;
        }
    }
    const u64 u = random_below(random_of(seed, position + count, 2), total), own = draws_residual ? residual : mass;
    if (before <= u && u < before + own) {
        draw_from_part<4>(part, u - before,
                          [&](u32 v, u64 (&weights)[4]) {
                              u64 masses[4], residuals[4], sum = 0;
                              weights_at(v, masses, residuals);
#pragma unroll
                              for (u32 i = 0; i < 4; ++i) sum += weights[i] = draws_residual ? residuals[i] : masses[i];
                              return sum;
                          },
                          [&](u32 v, u32 i, u64) { own_tokens[count] = target.token(v, i); });
    }
}

}  // namespace tilewright
