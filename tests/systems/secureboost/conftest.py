"""Connected gRPC ends, for `test_lattice_resend`, which breaks a connection in the midst of a query."""

from messaging.conftest import connect, grpc_end, identities, together_fixture

__all__ = ["connect", "grpc_end", "identities", "together_fixture"]
