package worker

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// TestNodes: the workers of a node share a host and a folder. The agents of lockstep run report only if they do so for
// all workers.
func TestNodes(t *testing.T) {
	for _, test := range []struct {
		name    string
		data    []string
		nodes   [][]int
		numbers []int
	}{
		{"nothing known", []string{"", "{}", "x"}, [][]int{{0}, {1}, {2}}, nil},
		{
			"two hosts",
			[]string{`"host_id":"a","folder":"f"`, `"host_id":"b","folder":"f"`, `"host_id":"a","folder":"f"`},
			[][]int{{0, 2}, {1}},
			nil,
		},
		{
			"another folder on the same host",
			[]string{`"host_id":"a","folder":"f"`, `"host_id":"a","folder":"g"`, `"host_id":"a","folder":""`},
			[][]int{{0}, {1}, {2}},
			nil,
		},
		{
			"hosts that a test has separated",
			[]string{`"host_id":"a","folder":"f","apart":"1"`, `"host_id":"a","folder":"f","apart":"2"`},
			[][]int{{0}, {1}},
			nil,
		},
		{"agents", []string{`"node":7`, `"node":7`, `"node":0`}, [][]int{{0, 1}, {2}}, []int{7, 0}},
		{
			"an agent for some only",
			[]string{`"host_id":"a","folder":"f","node":0`, `"host_id":"a","folder":"f"`},
			[][]int{{0, 1}},
			nil,
		},
	} {
		w := &Worker{session: newSession()}
		for i, data := range test.data {
			if len(data) > 2 {
				data = "{" + data + "}"
			}
			w.members = append(w.members, Member{Worker: i})
			w.registrations = append(w.registrations, rendezvous.Registration{Data: []byte(data)})
		}
		nodes, numbers := w.nodes()
		if fmt.Sprint(nodes) != fmt.Sprint(test.nodes) || !reflect.DeepEqual(numbers, test.numbers) {
			t.Errorf("%s: %v with numbers %v, want %v with %v", test.name, nodes, numbers, test.nodes, test.numbers)
		}
	}
}
