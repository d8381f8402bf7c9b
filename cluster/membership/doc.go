// Package membership determines which members of a job are alive. It is the only service that does: the ends of
// connections and processes that others notice are reported elsewhere, but silence is judged here.
//
// A node is the set of workers of one host that share a file ([NodeFile]). Each worker writes its heartbeat into its
// slot of the file. One process of the node, the [Reporter], reads the slots and sends one [Report] a second to the
// store, with the states of all its workers. One reporter of the job is the coordinator: it reads the reports of all
// nodes and writes the [View], one record with what is not normal: suspects, lost members, members that make no
// progress, members that have left. Every reporter reads the view and writes it into its node's file, where the
// workers read it. So N nodes cause about 4 N messages a second at the store, and the size of none is quadratic in
// the number of nodes or workers.
//
// The terms are those of SWIM (Das, Gupta, Motivala 2002). A member that misses three heartbeats is a suspect. Its next
// heartbeat refutes that. If none arrives within the heartbeat timeout, and the coordinator has read the store once
// more, the suspicion is confirmed: the member is lost. Only ages are transmitted, never times: every process measures
// with its own clock, and what a process did not see because it was stopped itself does not count against others.
//
// Leases. A worker's lease is the heartbeat timeout, counted from the moment at which it wrote the latest heartbeat
// that the store has acknowledged ([Member.Silence]). The coordinator counts the same time from the moment at which
// that heartbeat arrived, which is later. So a worker that is cut off ends, by [Member.Lost], before the others declare
// it lost. What a worker does between its last look at the clock and a write is not bounded by any lease: the store
// refuses writes of processes of an earlier epoch ([rendezvous.Fence]). The coordinator holds its role by the view's
// key: it renews it by [rendezvous.Store]'s Swap, so that a coordinator that was replaced while it was stopped cannot
// write. View.Term counts the coordinators.
package membership
