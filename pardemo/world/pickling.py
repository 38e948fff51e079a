"""Pickles functions, arguments and results as cloudpickle does, and tensors of every dense dtype."""

import io
import sys
import types
from typing import Any

import cloudpickle


def dumps(value: object) -> bytes:
    """``value`` for ``pickle.loads`` in another process."""
    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


class Pickler(cloudpickle.Pickler):
    """Pickles fp8 and uint16 to uint64 tensors too; :mod:`pardemo.testing.pickling` builds on it."""

    def reducer_override(self, value: Any) -> Any:
        """torch pickles 8-bit floats, wide unsigned integers and half complex numbers by a storage without a dtype, and
        cannot read that back: here they travel as the bytes of the storage. Code keeps the name of its file, which
        cloudpickle 3.1.3 leaves out: tracebacks read their source lines from it."""
        if type(value) is types.CodeType:
            make, arguments = self.dispatch_table[types.CodeType](value)
            return _code_of, (value.co_filename, make, arguments)
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor:
            arguments = value.__reduce_ex__(4)[1]
            if arguments and isinstance(arguments[0], torch.UntypedStorage):
                plain = value.detach().resolve_conj()
                stored = torch.empty(0, dtype=torch.uint8, device=plain.device).set_(plain.untyped_storage())
                view = plain.storage_offset(), plain.shape, plain.stride()
                return _tensor_of, (stored, value.dtype, *view, value.requires_grad)
        return super().reducer_override(value)


def _code_of(file: str, make: Any, arguments: tuple) -> types.CodeType:
    """Makes code as cloudpickle does, and names its file."""
    return make(*arguments).replace(co_filename=file)


def _tensor_of(stored: Any, dtype: Any, offset: int, shape: tuple, stride: tuple, requires_grad: bool) -> Any:
    """Makes the tensor of a dtype, offset, shape and stride over these bytes."""
    tensor = stored.new_empty(0, dtype=dtype)
    return tensor.set_(stored.untyped_storage(), offset, shape, stride).requires_grad_(requires_grad)
