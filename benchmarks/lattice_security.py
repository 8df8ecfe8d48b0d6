"""Bits of security of the lattice map's parameter sets, by the lattice-estimator (Albrecht, Player, Scott, 2015).

Needs Sage and the lattice-estimator (github.com/malb/lattice-estimator) on the Python path, which `make bench` does not
install: `PYTHONPATH=src:LATTICE_ESTIMATOR sage -python benchmarks/lattice_security.py VERSION`, whose output is
`benchmarks/results/lattice_security.txt`. A test compares it with the sets of `treaty.crypto.parameters`.

Each set is Learning with Errors of dimension N with as many samples as an attacker wishes; the ring's structure is not
used, as no attack is known that gains from it. Hybrid attacks, which gain from sparse secrets, and algebraic and
combinatorial ones, which are far behind at this size, are not run. Models of the cost of lattice reduction:
default (classical), MATZOV: gates of all sieves of BKZ; core-SVP, ADPS16: one sieve in the exponent's leading term
alone, far below what an attack costs; quantum, ChaLoy21: BKZ with the fastest quantum sieve on paper.
"""

from __future__ import annotations

import math
import sys
from importlib.metadata import PackageNotFoundError, version

from estimator import LWE, ND, RC
from estimator.reduction import ADPS16

from treaty.crypto.parameters import DEGREE, ERROR_BITS, LIMITS, SETS

MODELS = [
    ("default", RC.MATZOV),
    ("core-SVP", ADPS16()),
    ("core-SVP, quantum", ADPS16(mode="quantum")),
    ("quantum", RC.ChaLoy21_BKZ),
]
ATTACKS = [("usvp", LWE.primal_usvp), ("bdd", LWE.primal_bdd), ("dual_hybrid", LWE.dual_hybrid)]


def estimate(name: str, instance: LWE.Parameters) -> None:
    """Print the cost of each attack under each model, and the bits of the cheapest."""
    print(f"\n{name}")
    for model, cost in MODELS:
        found = {attack: run(instance, red_cost_model=cost) for attack, run in ATTACKS}
        for attack, result in found.items():
            print(f"  {model:18} {attack:12} {result!r}")
        bits = min(math.log2(float(result["rop"])) for result in found.values())
        print(f"  {model:18} {'bits':12} {bits:.2f}")


def main() -> None:
    """Print the transcript."""
    print(f"# {sys.argv[1]}" if len(sys.argv) > 1 else "# lattice-estimator, version not stated")
    try:
        print(f"# Sage: passagemath {version('passagemath-symbolics')}, Python {sys.version.split()[0]}")
    except PackageNotFoundError:
        print(f"# Python {sys.version.split()[0]}")
    print("# Kyber512 first: the estimator's own pages give usvp 143.8, dual_hybrid 139.2; core-SVP 118.6 and 115.4")
    error = ND.CenteredBinomial(3)
    estimate("Kyber512: n = 512, q = 3329", LWE.Parameters(n=512, q=3329, Xs=error, Xe=error, m=512))
    for primes in SETS.values():
        q = math.prod(primes)
        name = f"Treaty: N = {DEGREE}, {len(primes)} primes, q of {q.bit_length()} bits, product of {list(primes)}"
        name += f", ternary secrets, centred binomial errors of 2 * {ERROR_BITS} bits"
        estimate(name, LWE.Parameters(n=DEGREE, q=q, Xs=ND.Uniform(-1, 1), Xe=ND.CenteredBinomial(ERROR_BITS)))
    bits = LIMITS[DEGREE] + 1
    beyond = LWE.Parameters(n=DEGREE, q=2**bits, Xs=ND.Uniform(-1, 1), Xe=ND.CenteredBinomial(ERROR_BITS))
    estimate(f"Refused: N = {DEGREE}, a modulus of {bits} bits at its largest", beyond)


if __name__ == "__main__":
    main()
