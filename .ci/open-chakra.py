"""Reads Chakra traces by the schema and the reader that MLCommons publishes (mlc-chakra), and holds them against what
ASTRA-sim's feeder needs: versions it knows, ids that are there once, waits that name nodes of the same file and lead
nowhere in a circle, and for every send between two ranks with a tag a receive of as many bytes.

usage: open-chakra.py FILE..    files are called NAME.RANK.et
"""
import sys
from collections import Counter

from chakra.schema.protobuf.et_def_pb2 import (
    COMM_COLL_NODE, COMM_RECV_NODE, COMM_SEND_NODE, COMP_NODE, GlobalMetadata, Node,
)
from chakra.src.third_party.utils.protolib import decodeMessage, openFileRd


def nodes_of(file):
    trace, metadata, node, nodes = openFileRd(file), GlobalMetadata(), Node(), []
    assert decodeMessage(trace, metadata) and metadata.version == "0.0.4", (file, metadata)
    while decodeMessage(trace, node):
        nodes.append(Node())
        nodes[-1].CopyFrom(node)
    return nodes


def value(node, name):
    found = [attr for attr in node.attr if attr.name == name]
    assert len(found) == 1, (node.name, name)
    return getattr(found[0], found[0].WhichOneof("value"))


def check_order(file, nodes):
    waits = {node.id: set(node.data_deps) | set(node.ctrl_deps) for node in nodes}
    assert len(waits) == len(nodes), f"{file}: an id is there twice"
    behind = {id: [] for id in waits}
    for id, before in waits.items():
        for other in before:
            behind[other].append(id)
    left = {id: len(before) for id, before in waits.items()}
    free = [id for id, count in left.items() if count == 0]
    for id in free:
        for other in behind[id]:
            left[other] -= 1
            if left[other] == 0:
                free.append(other)
    assert len(free) == len(nodes), f"{file}: nodes wait for each other in a circle"


kinds, sends, receives = Counter(), Counter(), Counter()
for file in sys.argv[1:]:
    rank, nodes = int(file.split(".")[-2]), nodes_of(file)
    check_order(file, nodes)
    for node in nodes:
        kinds[node.type] += 1
        if node.type == COMM_SEND_NODE:
            sends[rank, value(node, "comm_dst"), value(node, "comm_tag"), value(node, "comm_size")] += 1
        if node.type == COMM_RECV_NODE:
            receives[value(node, "comm_src"), rank, value(node, "comm_tag"), value(node, "comm_size")] += 1
assert sends == receives, f"sends without receives: {sends - receives}; receives without sends: {receives - sends}"
assert sends and kinds[COMP_NODE] and kinds[COMM_COLL_NODE], kinds
print(f"{len(sys.argv) - 1} Chakra traces: {kinds[COMP_NODE]} kernels, {kinds[COMM_COLL_NODE]} collectives, "
      f"{sum(sends.values())} sends that meet receives")
