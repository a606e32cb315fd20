"""How a language stage runs a step's layers: eagerly, or by replaying a graph over static inputs."""
