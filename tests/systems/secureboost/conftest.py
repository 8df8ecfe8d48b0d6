"""Connected TLS ends, for `test_lattice_resend`, which breaks a connection in the midst of a query."""

from messaging.conftest import connect, identities, tls_end, together_fixture

__all__ = ["connect", "identities", "tls_end", "together_fixture"]
