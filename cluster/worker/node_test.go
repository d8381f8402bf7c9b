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
			[]string{
				`"folder":"f","transport":{"host":"a"}`, `"folder":"f","transport":{"host":"b"}`,
				`"folder":"f","transport":{"host":"a"}`,
			},
			[][]int{{0, 2}, {1}},
			nil,
		},
		{
			"another folder on the same host",
			[]string{
				`"folder":"f","transport":{"host":"a"}`, `"folder":"g","transport":{"host":"a"}`,
				`"folder":"","transport":{"host":"a"}`,
			},
			[][]int{{0}, {1}, {2}},
			nil,
		},
		{
			"hosts that a test has separated",
			[]string{
				`"folder":"f","transport":{"host":"a","apart":"1"}`, `"folder":"f","transport":{"host":"a","apart":"2"}`,
			},
			[][]int{{0}, {1}},
			nil,
		},
		{"agents", []string{`"node":7`, `"node":7`, `"node":0`}, [][]int{{0, 1}, {2}}, []int{7, 0}},
		{
			"an agent for some only",
			[]string{`"folder":"f","transport":{"host":"a"},"node":0`, `"folder":"f","transport":{"host":"a"}`},
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
		w.infos = decodeInfos(w.registrations)
		nodes, numbers := w.nodes()
		if fmt.Sprint(nodes) != fmt.Sprint(test.nodes) || !reflect.DeepEqual(numbers, test.numbers) {
			t.Errorf("%s: %v with numbers %v, want %v with %v", test.name, nodes, numbers, test.nodes, test.numbers)
		}
	}
}
