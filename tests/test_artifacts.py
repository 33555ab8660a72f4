import errno
import os

import pytest

from taser_jax.artifacts import storage_errors
from taser_jax.errors import StorageError


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_storage_errors_tells_what_to_do(number):
    expected = pytest.raises(StorageError, match="out/x: could not write")
    with expected as caught, storage_errors("out/x"):
        raise OSError(number, os.strerror(number))
    advice = "free some space" if number in (errno.ENOSPC, errno.EDQUOT) else "permissions"
    assert advice in (caught.value.fix or "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_storage_errors_catches_a_disk_that_is_really_full():
    expected = pytest.raises(StorageError, match="No space left")
    with expected, storage_errors("/dev/full"), open("/dev/full", "w") as file:
        file.write("x")


def test_storage_errors_leaves_other_errors_alone():
    with pytest.raises(FileNotFoundError), storage_errors("x"):
        raise FileNotFoundError(errno.ENOENT, "gone")
    with pytest.raises(ValueError, match="mine"), storage_errors("x"):
        raise ValueError("mine")
    with pytest.raises(StorageError, match="No space left"), storage_errors("x"):
        raise RuntimeError("write() failed: No space left on device")
