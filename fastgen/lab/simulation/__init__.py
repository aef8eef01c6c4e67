"""The simulated server: a workload and a load on the real engine over a simulated device, in virtual time."""

from fastgen.lab.simulation.run import Simulation, simulate
from fastgen.lab.simulation.settings import ServerSettings

__all__ = ["ServerSettings", "Simulation", "simulate"]
