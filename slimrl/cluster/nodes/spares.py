"""Spare nodes: free GPUs of the Ray cluster take the place of those of a lost node."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from slimrl.arguments import Arguments
from slimrl.cluster.nodes.comparison import check_nodes
from slimrl.cluster.nodes.logs import NodeLogs
from slimrl.cluster.nodes.watch import NodeWatch
from slimrl.cluster.placement import GpuBundle, GpuBundles
from slimrl.cluster.ray_session import InsufficientGpusError
from slimrl.cluster.supervisor import Supervisor

logger = logging.getLogger("slimrl")


class SpareNodes:
    """The free GPUs of the Ray cluster, for the training ranks and the servers of a node that is lost.

    Ray reserves them when it notices the loss. Its head is not replaced.
    """

    def __init__(
        self, args: Arguments, gpus: GpuBundles, supervisor: Supervisor, watch: NodeWatch, logs: NodeLogs
    ) -> None:
        self._args, self._gpus, self._supervisor = args, gpus, supervisor
        self._watch, self._logs = watch, logs

    def allow_of_servers(self) -> None:
        """From now on the loss of a node that has nothing but servers does not end the run, if it can be replaced."""
        self._watch.allow_spares(self._gpus.has_moved, of_training=False)

    def allow(self) -> None:
        """The same for a node with training ranks."""
        self._watch.allow_spares(self._gpus.has_moved, of_training=True)

    def follow_servers(self) -> None:
        """Watches the nodes on which servers were replaced, in the place of lost nodes that had nothing but servers."""
        try:
            found = self._gpus.follow(set(range(self._gpus.plan.total)) - self._gpus.beside_training())
        except InsufficientGpusError as error:
            logger.warning("the servers of a lost node are not replaced: %s", error)
            return
        if found:
            self._watch_nodes()
            self._copy_logs(found)
            logger.warning("servers continue on %s", ", ".join(sorted({gpu.node_ip for gpu in found})))

    def take_over(self, *, node_is_lost: bool) -> None:
        """Gives ranks and servers of lost nodes other GPUs, on nodes that are compared with the driver's, and watched.

        Raises InsufficientGpusError without such GPUs, NodesDifferError if their nodes cannot be used.
        """
        found = self._gpus.relocate(node_is_lost=node_is_lost)
        if not found:
            return
        self._watch_nodes()  # first: a wait would end with the lost node
        check_nodes(self._args, found, self._supervisor)
        self._copy_logs(found)
        logger.warning("training continues on %s", ", ".join(sorted({gpu.node_ip for gpu in found})))

    def _watch_nodes(self) -> None:
        self._watch.follow(self._gpus.gpus, self._gpus.plan, replaceable=self._args.use_fault_tolerance)

    def _copy_logs(self, found: Sequence[GpuBundle]) -> None:
        self._logs.follow({gpu.node for gpu in found})
        self._logs.wait()
