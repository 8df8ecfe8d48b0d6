"""Linear maps of encrypted vectors under Ring-LWE with a precomputed hint.

A linear map is the product of a party's secret integer matrix with another party's encrypted vectors, at the price of a
plain product. `linear_map` has both ends.

The *server* holds a matrix U (rows u_S over n entries: bins of a table, or its columns); the *client* asks for U m, for
any number of vectors m, and alone learns it. After SimplePIR (Henzinger et al., USENIX Security 2023), with hints that
are re-randomised and answers that are flooded or masked, so that neither reveals anything but the product.

Ring R_q = Z_q[X] / (X^N + 1); vectors are cut into blocks of N; <x, y> is the inner product of coefficients, p~ stands
for p(1 / X), and <u, a s> = <u a~, s>. Public elements a_0, a_1, ... a_J come from a seed that all parties made.

1. Hint, once per matrix: r_S ternary, e'_S binomial,  h_S = sum_j u_{S,j} a~_j + r_S a~_0 + e'_S.
2. Query, per vector: a fresh ternary s, binomial e:  b_j = a_j s + e_j + round(q m_j / 2^bits),  b_0 = a_0 s + e_0.
3. Answer: y_S = <u_S, b> + <r_S, b_0> + f_S, with f_S uniform on [-2^(k-1), 2^(k-1)); or no f_S, and a mask added to
   the scaled answer, uniform modulo q', of which the server keeps the negative: a share of the product and noise.
4. Opening: y_S - <h_S, s> = q <u_S, m> / 2^bits + f_S + noise, rounded: the noise is <u_S, e> + <r_S, e_0> - <e'_S, s>.

Before they are sent, hints and answers are scaled from q to q' = 2^(16 D), which is public arithmetic: it reveals
nothing more, takes a third off a hint, and leaves rounding errors that `Parameters.flood_bits` makes room for. A sum is
never wrong: all noise is bounded, not merely unlikely to be large. Assumptions, and what each side learns:
docs/lattice.md.
"""
