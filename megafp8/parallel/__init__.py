"""Process groups, device mesh, collectives and schedules; knows no models."""

from megafp8.parallel.collectives import CommGroup
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.startup import World, start, stop
from megafp8.parallel.traffic import Traffic

__all__ = ["CommGroup", "Mesh", "Traffic", "World", "build_mesh", "start", "stop"]
