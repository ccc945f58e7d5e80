"""A model that one rank cannot compile. A file of its own: it imports the compiler, once for all ranks of a launch."""

from __future__ import annotations

import os

import torch
import torch._inductor.async_compile
import torch._inductor.codegen.cpp
import torch._inductor.compile_fx
import torch._inductor.config
import torch._inductor.cpp_builder

from tests.scenarios.layered import Layered, LayeredTask


class LacksCompiler(LayeredTask):
    """On rank 1 there is no C++ compiler, and on rank 0 nothing that needs one."""

    def build_model(self):
        if os.environ["RANK"] == "0":
            return Uncompiled()
        torch._inductor.config.cpp.cxx = (None, "/nowhere/c++")
        return super().build_model()


class Uncompiled(Layered):
    """What torch.compile leaves as it is."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.forward = torch.compiler.disable(self.forward)
