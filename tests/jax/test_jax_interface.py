"""The layouts in bindings/xla_interface.h are those of the C interface of the installed jaxlib."""

import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

from linbias.jax.impl import cpu

BINDINGS = Path(__file__).parents[2] / "bindings"

# Ours, XLA's, and the fields in both spellings. Those of XLA's may go on, ours may not be longer.
SIZE, NEXT = "struct_size ", "struct_size extension=extension_start "
ITEMS = NEXT + "size kinds=types "
RECORDS = {
    ("Extension", "XLA_FFI_Extension_Base"): SIZE + "kind=type next",
    ("Version", "XLA_FFI_Api_Version"): NEXT + "major=major_version minor=minor_version",
    ("Metadata", "XLA_FFI_Metadata"): SIZE + "version=api_version traits",
    ("MetadataExtension", "XLA_FFI_Metadata_Extension"): "base=extension_base metadata",
    ("ErrorArguments", "XLA_FFI_Error_Create_Args"): NEXT + "message code=errc",
    ("Functions", "XLA_FFI_Api"): NEXT
    + "version=api_version internal=internal_api create_error=XLA_FFI_Error_Create",
    ("Buffer", "XLA_FFI_Buffer"): NEXT + "type=dtype data rank sizes=dims",
    ("Text", "XLA_FFI_ByteSpan"): "data=ptr size=len",
    ("Scalar", "XLA_FFI_Scalar"): "type=dtype value",
    ("Buffers", "XLA_FFI_Args"): ITEMS + "items=args",
    ("Buffers", "XLA_FFI_Rets"): ITEMS + "items=rets",
    ("Attributes", "XLA_FFI_Attrs"): ITEMS + "names items=attrs",
    ("CallFrame", "XLA_FFI_CallFrame"): NEXT
    + "functions=api context=ctx stage arguments=args results=rets attributes=attrs",
}
NUMBERS = {
    "Stage::execute": "XLA_FFI_ExecutionStage_EXECUTE",
    "AttributeKind::scalar": "XLA_FFI_AttrType_SCALAR",
    "ExtensionKind::metadata": "XLA_FFI_Extension_Metadata",
    "ErrorCode::invalid_argument": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "ErrorCode::resource_exhausted": "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED",
    "ErrorCode::internal": "XLA_FFI_Error_Code_INTERNAL",
    "Type::boolean": "XLA_FFI_DataType_PRED",
    "Type::int32": "XLA_FFI_DataType_S32",
    "Type::float16": "XLA_FFI_DataType_F16",
    "Type::float32": "XLA_FFI_DataType_F32",
    "Type::float64": "XLA_FFI_DataType_F64",
    "Type::bfloat16": "XLA_FFI_DataType_BF16",
}


def test_what_the_binding_reads_lies_where_xla_puts_it():
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    rules = []
    for (own, theirs), fields in RECORDS.items():
        for pair in fields.split():
            ours, _, named = pair.partition("=")
            named = named or ours
            rules.append(f"offsetof(own::{own}, {ours}) == offsetof({theirs}, {named})")
            rules.append(f"sizeof(own::{own}::{ours}) <= sizeof({theirs}::{named})")
    rules += [f"int(own::{ours}) == {theirs}" for ours, theirs in NUMBERS.items()]
    rules.append("own::interface_major == XLA_FFI_API_MAJOR")
    rules.append("own::interface_minor <= XLA_FFI_API_MINOR")
    includes = '#include "xla/ffi/api/c_api.h"\n#include "xla_interface.h"\n'
    source = includes + "namespace own = linbias::xla;\n"
    source += "".join(f"static_assert({rule});\n" for rule in rules)
    folders = [f"-I{folder}" for folder in (f"{jaxlib.__path__[0]}/include", BINDINGS)]
    done = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", "-w", *folders, "-x", "c++", "-"],
        input=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(cpu.WHY_MISSING is not None, reason="not compiled")
@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({}, "no usable attribute causal"),
        ({"causal": np.float64(1)}, "no usable attribute causal"),
    ],
)
def test_a_call_that_the_handler_cannot_read_is_an_error_of_xla(attributes, words):
    cpu._register()
    arrays = [jnp.zeros((1, 1, 1, 1))] * 12
    results = [jax.ShapeDtypeStruct((1, 1, 1, 1), np.float32)] * 4
    with pytest.raises(Exception, match=re.escape(f"attention: {words}")):
        jax.block_until_ready(jax.ffi.ffi_call("linbias_forward", results)(*arrays, **attributes))
    with pytest.raises(Exception, match="attention: arrays are missing"):
        jax.block_until_ready(jax.ffi.ffi_call("linbias_forward", results)(*arrays[1:]))
