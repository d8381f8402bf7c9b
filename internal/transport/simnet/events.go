package simnet

import (
	"container/heap"
	"time"
)

// event is an action at a time.
type event struct {
	at     time.Time
	number uint64
	do     func()
}

// events are ordered by time, and those of one time in the order in which they were pushed.
type events struct {
	heap   eventHeap
	number uint64
}

func (e *events) push(v event) {
	e.number++
	v.number = e.number
	heap.Push(&e.heap, v)
}

func (e *events) pop() event { return heap.Pop(&e.heap).(event) }

type eventHeap []event

func (h eventHeap) Len() int { return len(h) }

func (h eventHeap) Less(i, j int) bool {
	if !h[i].at.Equal(h[j].at) {
		return h[i].at.Before(h[j].at)
	}
	return h[i].number < h[j].number
}

func (h eventHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }

func (h *eventHeap) Push(v any) { *h = append(*h, v.(event)) }

func (h *eventHeap) Pop() any {
	old := *h
	last := old[len(old)-1]
	old[len(old)-1] = event{}
	*h = old[:len(old)-1]
	return last
}
