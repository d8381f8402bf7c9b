package distribute_test

import (
	"fmt"
	"os"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/devicelist"
)

// setTFConfig sets TF_CONFIG to the case's value, or unsets it if the case has none.
func (g *goldenRun) setTFConfig() {
	text, ok := g.c.Inputs["TF_CONFIG"].(string)
	g.Setenv("TF_CONFIG", text)
	if !ok {
		os.Unsetenv("TF_CONFIG") // t.Setenv restores it at the end
	}
}

func goldenMirroredInit(g *goldenRun) (map[string]any, error) {
	g.setTFConfig()
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{
		Devices:     names(g.c.Inputs["devices"]),
		LogicalCPUs: goldenCPUs,
	})
	if err != nil {
		return nil, err
	}
	defer s.Close()
	return map[string]any{"value": map[string]any{
		"worker_devices":       anys(s.Devices()),
		"num_replicas_in_sync": s.NumReplicasInSync(),
	}}, nil
}

func goldenMultiWorkerInit(g *goldenRun) (map[string]any, error) {
	g.setTFConfig()
	cfg := distribute.MultiWorkerConfig{LogicalCPUs: goldenCPUs}
	if o, ok := g.c.Options["communication_options"]; ok {
		return nil, fmt.Errorf("options %v: %w", o, errNotInGo)
	}
	switch r := g.c.Options["resolver"].(type) {
	case nil:
	case map[string]any:
		ctor, _ := r["ctor"].(map[string]any)
		resolver, err := simpleResolver(r["cluster_spec"], ctor)
		if err != nil {
			return nil, clusterError(err)
		}
		cfg.Resolver = resolver
	default:
		return nil, fmt.Errorf("resolver %v: %w", r, errNotInGo)
	}
	s, err := distribute.NewMultiWorkerMirroredStrategy(cfg)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	p := s.Properties()
	return map[string]any{"value": map[string]any{
		"num_replicas_in_sync": p.NumReplicasInSync, "worker_devices": anys(p.WorkerDevices),
		"should_checkpoint": p.ShouldCheckpoint, "in_multi_worker_mode": p.InMultiWorkerMode,
	}}, nil
}

func goldenDeviceList(g *goldenRun) (map[string]any, error) {
	devices := names(g.c.Inputs["devices"])
	switch fn := g.c.Options["fn"]; fn {
	case "is_single_worker":
		single, err := device.IsSingleWorker(devices)
		return map[string]any{"value": single}, err
	case "group":
		groups, err := devicelist.ByTask(devices)
		out := map[string]any{}
		for job, tasks := range groups {
			lists := []any{}
			for _, names := range tasks {
				lists = append(lists, anys(names))
			}
			out[job] = lists
		}
		return map[string]any{"value": out}, err
	case "infer_num_gpus":
		if len(devices) == 0 {
			return map[string]any{"value": nil}, nil // None: nothing to count
		}
		n, err := devicelist.GPUsPerWorker(devices)
		return map[string]any{"value": n}, err
	default:
		return nil, fmt.Errorf("the runner does not know the function %v", fn)
	}
}

func anys(names []string) []any {
	out := []any{}
	for _, name := range names {
		out = append(out, name)
	}
	return out
}
