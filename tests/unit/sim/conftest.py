"""Tests of this folder may be coroutine functions, and have a virtual `loop`."""

from tests.support.coroutines import loop, pytest_pyfunc_call  # noqa: F401
