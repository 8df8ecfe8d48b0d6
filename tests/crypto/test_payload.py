import numpy as np
import pytest

from treaty.crypto.payload import check_payload
from treaty.errors import CryptoError

EXPECTED = [(np.uint8, (None, 2)), (np.int32, (3,))]


def test_payload_of_expected_arrays_is_accepted():
    check_payload([np.zeros((5, 2), np.uint8), np.zeros(3, np.int32)], "a test", *EXPECTED)


@pytest.mark.parametrize(
    "payload",
    [
        [np.zeros((5, 2), np.uint8)],
        [np.zeros((5, 2), np.uint8), np.zeros(3, np.int64)],
        [np.zeros((5, 2), np.uint8), np.zeros(3, ">i4")],
        [np.zeros((5, 2), np.uint8), np.zeros(4, np.int32)],
        [np.zeros((5, 3), np.uint8), np.zeros(3, np.int32)],
        [np.zeros(10, np.uint8), np.zeros(3, np.int32)],
        [np.zeros((5, 4), np.uint8)[:, ::2], np.zeros(3, np.int32)],
    ],
    ids=["missing", "dtype", "byte order", "length", "columns", "dimensions", "strided"],
)
def test_payload_that_differs_is_refused(payload):
    with pytest.raises(CryptoError, match=r"in .*a test"):
        check_payload(payload, "a test", *EXPECTED)
