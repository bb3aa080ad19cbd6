/* Graphs: what was captured, replayed in a random order among those that its dependencies allow. */
#include "tests/cudasim/runtime.h"

using namespace cudasim;

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long)
{
    if (const cudaError_t error = enter("cudaGraphInstantiate", cudaErrorMemoryAllocation))
        return error;
    CUgraphExec_st *made = new CUgraphExec_st{graph->nodes};
    /* Work that waits for other processes keeps its order, else two of them could wait for each other here, where one
     * thread runs all nodes. */
    size_t last = SIZE_MAX;
    for (size_t i = 0; i < made->nodes.size(); i++) {
        if (!made->nodes[i].ordered)
            continue;
        if (last != SIZE_MAX)
            made->nodes[i].after.push_back(last);
        last = i;
    }
    *exec = made;
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t)
{
    return enter("cudaGraphUpload");
}

static cudaError_t replay(const std::vector<graph_node> &nodes, uint64_t seed)
{
    random_numbers dice = {seed};
    std::vector<size_t> missing(nodes.size()), ready;
    std::vector<std::vector<size_t>> next(nodes.size());
    for (size_t i = 0; i < nodes.size(); i++) {
        missing[i] = nodes[i].after.size();
        for (size_t before : nodes[i].after)
            next[before].push_back(i);
        if (missing[i] == 0)
            ready.push_back(i);
    }
    while (!ready.empty()) {
        const size_t at = dice.below(static_cast<uint32_t>(ready.size())), node = ready[at];
        ready[at] = ready.back();
        ready.pop_back();
        if (const cudaError_t error = nodes[node].run())
            return error;
        for (size_t i : next[node])
            if (--missing[i] == 0)
                ready.push_back(i);
    }
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    if (const cudaError_t error = enter("cudaGraphLaunch"))
        return error;
    const uint64_t seed = draw_seed();
    std::vector<graph_node> nodes = exec->nodes;
    for (graph_node &node : nodes)
        if (node.prepare)
            node.run = node.prepare();
    return leave(enqueue(
        stream, [nodes = std::move(nodes), seed] { return replay(nodes, seed); }, true));
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    if (nodes)
        return leave(cudaErrorNotSupported);
    *count = graph->nodes.size();
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    delete exec;
    return cudaSuccess;
}
