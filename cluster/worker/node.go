package worker

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/private"
)

// nodes returns the workers of each node, ascending, in the order of their first workers. The workers of a node are on
// one host and share this user's folder; a worker without that folder is a node by itself. If the agents of lockstep
// run report for all workers, their nodes are the nodes, and numbers has the number of each.
func (w *Worker) nodes() (nodes [][]int, numbers []int) {
	at, alone, launched := map[string]int{}, map[string]int{}, true
	var byHost, byNode [][]int
	for i := range w.members {
		a := &w.infos[i]
		id := fmt.Sprint(i)
		if host := a.Transport.Host; host != "" && a.Folder != "" {
			id = host + " " + a.Folder + " " + a.Transport.Apart
		}
		byHost = appendTo(byHost, at, id, i)
		if launched = launched && a.Node != nil; launched {
			before := len(byNode)
			if byNode = appendTo(byNode, alone, fmt.Sprint(*a.Node), i); len(byNode) > before {
				numbers = append(numbers, *a.Node)
			}
		}
	}
	if launched {
		return byNode, numbers
	}
	return byHost, nil
}

// appendTo appends a worker to the list with an id, whose index is in at.
func appendTo(lists [][]int, at map[string]int, id string, worker int) [][]int {
	if _, known := at[id]; !known {
		at[id] = len(lists)
		lists = append(lists, nil)
	}
	lists[at[id]] = append(lists[at[id]], worker)
	return lists
}

// openLaunched opens the file by which lockstep run reads the heartbeats of its workers, and returns the node's number;
// nil if there is none, or if this process cannot open it, as in another container.
func (w *Worker) openLaunched() (*int, *membership.NodeFile) {
	path, _ := w.cfg.Getenv(cluster.EnvNodeFile)
	number, _ := w.cfg.Getenv(cluster.EnvNode)
	node, err := strconv.Atoi(number)
	if path == "" || err != nil || node < 0 || w.job.Source != "lockstep run" || w.job.LocalWorker < 0 ||
		w.job.LocalWorker >= w.job.LocalWorkers {
		return nil, nil
	}
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
		return nil, nil
	}
	file, err := membership.OpenNodeFile(path, w.job.LocalWorkers)
	if err != nil {
		return nil, nil
	}
	return &node, file
}

// folderID identifies the folder that the workers of a node share; "": there is none.
func folderID() string {
	folder, err := private.Folder()
	if err != nil {
		return ""
	}
	id, err := private.ID(folder)
	if err != nil {
		return ""
	}
	return id
}

const (
	nodeFilePrefix = "heartbeats-"
	nodeFileOld    = 24 * time.Hour // files of workers that were killed while they joined
)

// nodeFile opens the file of this worker's node. The caller closes it.
func (w *Worker) nodeFile(nodes [][]int) (*membership.NodeFile, error) {
	var mine []int
	for _, workers := range nodes {
		for _, i := range workers {
			if i == w.job.Worker {
				mine = workers
			}
		}
	}
	if len(mine) == 1 {
		return membership.NewMemoryFile(1), nil
	}
	folder, err := private.Folder()
	if err != nil {
		return nil, fmt.Errorf("the folder in which the workers of this host exchange heartbeats: %w", err)
	}
	if w.job.Worker == mine[0] {
		removeOld(folder)
	}
	first := &w.registrations[mine[0]]
	sum := sha256.Sum256([]byte(strings.Join([]string{first.Job, fmt.Sprint(first.Epoch), first.Nonce}, "\n")))
	return membership.OpenNodeFile(filepath.Join(folder, nodeFilePrefix+hex.EncodeToString(sum[:12])), len(mine))
}

// removeOld removes the files that killed workers left.
func removeOld(folder string) {
	entries, _ := os.ReadDir(folder) // nothing to remove, or the next call fails too
	for _, e := range entries {
		info, err := e.Info()
		if err == nil && strings.HasPrefix(e.Name(), nodeFilePrefix) && time.Since(info.ModTime()) > nodeFileOld {
			os.Remove(filepath.Join(folder, e.Name()))
		}
	}
}
