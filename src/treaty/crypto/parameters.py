"""Security parameters of the ciphers, each with its source. Nothing else in the package sets one.

References: NIST SP 800-57 part 1 rev. 5, table 2 (strength of factoring moduli). Cheng et al., SecureBoost, arXiv
1901.08755 (Paillier with 512 bits, which only tests and reproductions may ask for). Coron, Naccache, Paillier,
Accelerating Okamoto-Uchiyama Public-Key Cryptosystem, Electronics Letters 35, 1999.
"""

KEY_BITS = (2048, 3072, 4096)  # accepted sizes of n; 2048 is 112-bit strength; others need `insecure_test_key_bits`
OU_DEFAULT_KEY_BITS = 3072  # size of n = p^2 q: 128-bit strength (SP 800-57)
PAILLIER_DEFAULT_KEY_BITS = 3072  # size of n = p q: 128-bit strength (SP 800-57)

# u | p - 1 and v | q - 1: finding a discrete logarithm or the order takes 2^128 steps (rho)
OU_SUBGROUP_PRIME_BITS = 256
OU_INSECURE_SUBGROUP_SHARE = 4  # test keys with primes below 512 bits: u and v take a fourth of the primes' bits

# p - 1 = 2 u k with primes u and k, k of this size: a random square generates all squares but for 2^-63
PAILLIER_SMALL_PRIME_BITS = 64
# test keys with primes below 128 bits: k takes half of the prime's bits, so that some k always gives a prime
PAILLIER_INSECURE_SMALL_PRIME_SHARE = 2

# secure comparison: masks are this much longer than the numbers compared, so that N comparisons tell at most N 2^-100
COMPARISON_MASK_BITS = 100
STATISTICAL_BITS = 80  # exponents are this much longer than the group's order: statistical distance at most 2^-80
# factors that hide from a key's owner: so many random bits beyond the length of n, and so many random bases beyond two
# (see `additive/randomiser`), leave a statistical distance of 2^-80, too
RANDOMISER_SPARE = 2 * STATISTICAL_BITS
PRIMALITY_ROUNDS = 40  # of Miller-Rabin after Baillie-PSW: error below 4^-40 even for hostile candidates (Rabin 1980)

SMALL_FACTOR_BOUND = 1 << 16  # a public modulus with a prime factor below this is refused
# of a key's modulus: each root proves to 2^-16 (no factor is smaller), each square root to 1/2, together to 2^-128
KEY_PROOF_ROOTS = 8
KEY_PROOF_SQUARES = 128
SMALL_ORDER_BOUND = 1 << 16  # so is a base whose order has no prime power beyond this: half a second at 3072 bits
SMALL_ORDER_INSECURE_SHARE = 16  # test keys below 256 bits: the bound has a sixteenth of the modulus's bits
