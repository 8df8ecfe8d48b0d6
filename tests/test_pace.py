"""Limits of tests follow the machine."""

import os

import pace


def test_limits_are_those_given_on_an_idle_machine_as_fast_as_the_reference(monkeypatch):
    monkeypatch.setattr(pace, "start_up", lambda: pace.REFERENCE / 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    assert pace.within(10) == 10


def test_limits_are_longer_on_a_machine_that_is_slower_or_busier(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    monkeypatch.setattr(pace, "start_up", lambda: pace.REFERENCE * 3)
    assert pace.within(10) == 30
    monkeypatch.setattr(os, "getloadavg", lambda: (5.0 * os.cpu_count(), 0.1, 0.1))
    assert pace.within(10) == 50


def test_the_machine_is_measured_once():
    assert pace.start_up() == pace.start_up() > 0.01
