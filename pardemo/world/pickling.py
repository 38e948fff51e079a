"""Functions, arguments and results as bytes, as cloudpickle makes them; with it tensors of every dense dtype."""

import io
import sys
from typing import Any

import cloudpickle


def dumps(value: object) -> bytes:
    """``value`` for ``pickle.loads`` in another process."""
    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


class Pickler(cloudpickle.Pickler):
    """cloudpickle's, and tensors of every dense dtype; for rooms that leave out more."""

    def reducer_override(self, value: Any) -> Any:
        """torch pickles 8-bit floats, wide unsigned integers and half complex numbers by a storage without a dtype, and
        cannot read that back: here they travel as the bytes of the storage."""
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor:
            arguments = value.__reduce_ex__(4)[1]
            if arguments and isinstance(arguments[0], torch.UntypedStorage):
                own = value.detach().resolve_conj()
                stored = torch.empty(0, dtype=torch.uint8, device=own.device).set_(own.untyped_storage())
                place = own.storage_offset(), own.shape, own.stride()
                return _tensor_of, (stored, value.dtype, *place, value.requires_grad)
        return super().reducer_override(value)


def _tensor_of(stored: Any, dtype: Any, offset: int, shape: tuple, stride: tuple, requires_grad: bool) -> Any:
    """The tensor that lies so in these bytes."""
    tensor = stored.new_empty(0, dtype=dtype)
    return tensor.set_(stored.untyped_storage(), offset, shape, stride).requires_grad_(requires_grad)
