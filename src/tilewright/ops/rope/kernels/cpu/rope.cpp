// Rotary embedding: each token's row of the tables is converted to float32 once and serves all heads of q and k.
//
// Compiled with -ffp-contract=off: a fused multiply-add would skip the rounding of one of the two products.
#include <tilewright/host/parallel.h>
#include <tilewright/host/rows.h>

namespace tilewright {

constexpr int kMaxRotary = 2048;

// x * angle, rounded to their dtype if both have one, as the model does; else the model computes in float32.
template <class T, class A>
struct Product {
    static F32 product(F32 x, F32 angle) { return x * angle; }
};
template <class T>
struct Product<T, T> {
    static F32 product(F32 x, F32 angle) { return rounded<T>(x * angle); }
};

// T: dtype of q, k and the results.  A: of cos and sin.  I: of positions.  kInterleaved: pairs are adjacent elements.
template <class Config, class T = typename Config::T, class A = typename Config::A, class I = typename Config::I>
void rope(T* yq, T* yk, const T* q, const T* k, const A* cos, const A* sin, const I* positions,  //
          int64_t b, int64_t s, int64_t h, int64_t h_kv, int64_t d, int64_t r, int64_t table_rows,
          int64_t yq_b, int64_t yq_h, int64_t yq_s, int64_t yk_b, int64_t yk_h, int64_t yk_s,  // strides
          int64_t q_b, int64_t q_h, int64_t q_s, int64_t k_b, int64_t k_h, int64_t k_s,  //
          int64_t table_b, int64_t table_s, int64_t positions_b, int64_t positions_s, int threads) {
    using Angle = Product<T, A>;
    using Row = RowOf<T, A>;
    using Pairs = Order<true>;  // adjacent pairs: first elements in one register, second ones in the other
    const int64_t pairs = r / 2;

    // Load a token's row of a table: consecutive floats if kInterleaved, else in the register order of `Row`.
    auto load_angles = [=](const A* table, int64_t batch, int64_t token, F32* angles) {
        int64_t offset = batch * table_b + token * table_s;
        if (positions != nullptr) {
            const int64_t row = positions[batch * positions_b + token * positions_s];
            offset = row >= 0 && row < table_rows ? row * table_s : -1;
        }
        sweep(pairs, [=](int64_t i, auto extent) {
            F32 v{splat(__builtin_nanf("")), splat(__builtin_nanf(""))};  // outside the table, as on a GPU
            if (offset >= 0) v = Row::load(table + offset + i, extent);
            if (Config::kInterleaved)
                Row::store(reinterpret_cast<float*>(angles) + i, v, Whole{});
            else
                angles[slot(i)] = v;
        });
    };

    auto rotate = [=](T* y, const T* x, const F32* c, const F32* sn) {
        if constexpr (Config::kInterleaved) {
            sweep(r, [=](int64_t i, auto extent) {
                const F32 v = Pairs::load(x + i, extent);
                Float cosine, sine;
                __builtin_memcpy(&cosine, reinterpret_cast<const float*>(c) + i / 2, sizeof(cosine));
                __builtin_memcpy(&sine, reinterpret_cast<const float*>(sn) + i / 2, sizeof(sine));
                const F32 v_cos = Angle::product(v, {cosine, cosine}), v_sin = Angle::product(v, {sine, sine});
                Pairs::store(y + i, F32{v_cos.a - v_sin.b, v_cos.b + v_sin.a}, extent);
            });
        } else {
            sweep(pairs, [=](int64_t i, auto extent) {
                const F32 x1 = Row::load(x + i, extent), x2 = Row::load(x + pairs + i, extent);
                const F32 cosine = c[slot(i)], sine = sn[slot(i)];
                Row::store(y + i, Angle::product(x1, cosine) - Angle::product(x2, sine), extent);
                Row::store(y + pairs + i, Angle::product(x2, cosine) + Angle::product(x1, sine), extent);
            });
        }
        if (r < d) __builtin_memcpy(y + r, x + r, (d - r) * sizeof(T));
    };

    parallel(b * s, b * s * (h + h_kv) * d, threads, [=](int64_t begin, int64_t end) {
        F32 c[kMaxRotary / 2 / kWidth + 1], sn[kMaxRotary / 2 / kWidth + 1];
        for (int64_t task = begin; task < end; ++task) {
            const int64_t batch = task / s, token = task % s;
            load_angles(cos, batch, token, c);
            load_angles(sin, batch, token, sn);
            T *const y_q = yq + batch * yq_b + token * yq_s, *const y_k = yk + batch * yk_b + token * yk_s;
            const T *const x_q = q + batch * q_b + token * q_s, *const x_k = k + batch * k_b + token * k_s;
            for (int64_t head = 0; head < h; ++head) rotate(y_q + head * yq_h, x_q + head * q_h, c, sn);
            for (int64_t head = 0; head < h_kv; ++head) rotate(y_k + head * yk_h, x_k + head * k_h, c, sn);
        }
    });
}

}  // namespace tilewright
