// Package doctor examines a job before it trains: whether every pair of workers reaches each other, how fast, and whether they are alike.
//
// It joins the job as any program does (package worker), so it runs under every launcher that a training runs under. Then the pairs are
// tested, over a communicator of the two: the transport that they have, the time of a round trip, the rate each way, and by how much
// their clocks differ. Up to eight workers are tested a pair at a time; of more, as many pairs at once as there can be, each worker in
// one. A pair that does not answer in time is named, and the others go on.
package doctor
