import pytest

from treaty.errors import LocalProtocolError
from treaty.messaging.memory import memory_channels


def test_every_party_gets_its_own_end():
    channels = memory_channels(["clinic", "lab"])
    assert {name: channel.name for name, channel in channels.items()} == {"clinic": "clinic", "lab": "lab"}


def test_names_must_differ():
    with pytest.raises(LocalProtocolError, match="expected different party names"):
        memory_channels(["clinic", "clinic"])


def test_a_party_that_has_gone_is_not_told_of_later_departures():
    channels = memory_channels(["clinic", "lab"])
    channels["lab"].close()
    channels["clinic"].close()
