"""Has libtpu's compiler take StableHLO programs, on a machine without a TPU; needs jax and libtpu only.

    python tpu_compile.py PROGRAM.stablehlo... [--topologies v4:2x2x1 v5e:2x2 v5p:2x2x1 v6e:2x2]

Prints one line of JSON per program and topology: the conditionals and host callbacks of the compiled program and the
memory it takes. It is a process of its own because libtpu and TensorFlow do not share one.
"""

import argparse
import json
import os
import pathlib
import re

# Without these libtpu asks a cloud server which TPU this is.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2")


def compiled(text, topology):
    """What libtpu makes of a program for one device of a topology."""
    from jax.experimental import topologies
    from jax.extend.mlir import ir
    from jax.interpreters.mlir import make_ir_context
    from jaxlib.xla_client import DeviceList

    device = topologies.get_topology_desc(topology, "tpu").devices[0]
    with make_ir_context():
        program = device.client.compile(ir.Module.parse(text), DeviceList((device,)))
    hlo = "\n".join(module.to_string() for module in program.hlo_modules())
    memory = program.get_compiled_memory_stats()
    return {
        "device": device.device_kind,
        "conditionals": len(re.findall(r"\bconditional\(", hlo)),
        "host callbacks": len(re.findall(r"\b(outfeed|infeed|send|recv)\(|callback", hlo)),
        "bytes of arguments": memory.argument_size_in_bytes,
        "bytes of temporaries": memory.temp_size_in_bytes,
    }


def main():
    """Prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("programs", nargs="+", type=pathlib.Path)
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES)
    options = parser.parse_args()
    for path in options.programs:
        for topology in options.topologies:
            print(json.dumps({"program": path.stem, "topology": topology, **compiled(path.read_text(), topology)}))


if __name__ == "__main__":
    main()
