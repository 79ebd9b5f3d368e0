"""Multi-linear (block-term) attention: a third-order tensor of queries, keys and values, made causal.

Tensorized Transformer, section 3:  A_ijm = sum_r g_r q_ir k_jr v_mr,  with q, k, v of width R and a diagonal core g.
No softmax. In the published code every position reads the future; here A_ijm is used only for j <= i and m <= i.
The forms differ in the read-out of the slice A_i.. of a position:

    relative   y_i = sum_{a,b<n} W[:,a,b] A_{i,i-a,i-b}               any length; state 2nR
    absolute   y_i = N/(i+1) sum_{j,m<=i} W[:,j,m] A_ijm              at most N positions; state 2NR
    summed     y_i = W (g . q_i . S^K_i . S^V_i), S decaying sums     any length; state 2R
    tied       y_i = W 1/(i+1) sum_{j<=i} (sum_r g_r q_ir k_jr) v_j   any length, no positions; state R d_v

Cores: h cores that share a read-out are averaged (paper, eq. 8), and have the function class of one; with
`shared_readout=False` each has a read-out, y_i = sum_c W_c vec(A^c_i). A core is a free vector, or softmax(g) (eq. 6).

Prefix: its positions have no lag and no slot, so that every text position reads all of them alike, as in the encoder
form: each key is paired with the value of its position, P = 1/S sum_s k_s v_s^T, and y_i += W_P (g . q_i) P.  Only P is
cached. The tied form needs no W_P: its pairs have this form, and those of the prefix come first.

Shapes: B rows, N prefixes, T positions, S prefix positions, R rank, V value width, C read-outs, d model width.
"""

from .base import MultiLinear
from .sums import SummedMultiLinear, TiedMultiLinear
from .windowed import AbsoluteMultiLinear, RelativeMultiLinear
